"""The record of a model's routing: recorded in one pass, replayed in another, checked and compared on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxlowprec.arguments import array, as_array, cut, shown, whole_number
from jaxlowprec.moe.rollout import Form, captured, encoded
from jaxlowprec.moe.tape_dtype import AFRESH, check_fits, is_tape_dtype, narrowed, tape_dtype, widened


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingTape:
    """The experts of every token in every layer of a model. A pytree with one leaf.

    No layer keeps it as state: a pass takes it as an argument and returns the one it used. Under jit, remat and
    sharding it is an operand like any other; `jax.lax.scan` over layers takes `tape.experts` as xs and returns one as
    ys.

    Attributes:
        experts: int32, int16 or uint8 [layers, *tokens, k], in the order in which a token's outputs are summed; a row
            of -1, in uint8 of 255, chooses afresh. The axes of tokens are those of the activations, such as [batch,
            time].

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> tape = jlp.moe.RoutingTape(jnp.asarray([[[0, 1], [2, 0]], [[1, 3], [-1, -1]]], jnp.int32))
    >>> tape, tape[1].tolist()
    (RoutingTape(2 layers, 2 tokens, k=2), [[1, 3], [-1, -1]])
    >>> tape.check(num_experts=3)
    Traceback (most recent call last):
    ValueError: RoutingTape: layer 1, token 0 has experts [1, 3]; needs ids below 3, the number of experts
    """

    experts: Int[Array, "L *T k"]

    @classmethod
    def afresh(cls, layers: int, tokens: int | tuple[int, ...], k: int, dtype: Any = "int32") -> RoutingTape:
        """A tape with which every token chooses afresh; use it to record with the program that replays.

        A block of experts records in the dtype of the tape that it is given.

        >>> import jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.afresh(2, (4, 16), k=2).experts.shape
        (2, 4, 16, 2)
        """
        who = "RoutingTape.afresh"
        sizes = (whole_number(who, "layers", layers, 0), *_as_sizes(who, tokens), whole_number(who, "k", k, 1))
        if math.prod(sizes) >= 2**31:
            raise ValueError(f"{who}: {sizes} are 2^31 choices or more; needs fewer")
        return cls(jnp.full(sizes, AFRESH, jnp.int32).astype(tape_dtype(who, dtype)))  # in uint8 255

    @classmethod
    def of_layers(cls, layers: Sequence[Int[Array, "*T k"]]) -> RoutingTape:
        """The tape of layers that are run one by one: `[aux.tape for each]`.

        >>> import jax.numpy as jnp, jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.of_layers([jnp.zeros((8, 1), jnp.int32)] * 3)
        RoutingTape(3 layers, 8 tokens, k=1)
        """
        who = "RoutingTape.of_layers"
        listed = isinstance(layers, list | tuple) or (isinstance(layers, jax.Array | np.ndarray) and layers.ndim > 0)
        if not listed or not len(layers):
            raise TypeError(f"{who}: layers={shown(layers)}; needs an array [*tokens, k] for each layer")
        found = [array(who, f"layers[{i}]", layers[i]) for i in range(len(layers))]  # iterating an array traces
        if len({(layer.shape, layer.dtype) for layer in found}) > 1 or not is_tape_dtype(found[0].dtype):
            kinds = cut(", ".join(f"{layer.dtype}{list(layer.shape)}" for layer in found), 200)
            raise ValueError(f"{who}: layers are {kinds}; needs int32, int16 or uint8 of one shape [*tokens, k]")
        return cls(jnp.stack(found))

    @classmethod
    def from_routed_experts(
        cls,
        sequences: Sequence[np.ndarray | bytes | str],
        *,
        num_layers: int,
        k: int,
        num_experts: int,
        dense_layers: Sequence[int] = (),
        length: int | None = None,
        starts: Sequence[int] | None = None,
        bytes_dtype: str = "int32",
        dtype: Any = "int32",
    ) -> RoutingTape:
        """The routing that a rollout engine used: SGLang's and vLLM's `routed_experts`.

        An engine never runs a sequence's last token, so it chooses afresh, as do the places that pad shorter sequences.

        Arguments:
            sequences: for each sequence integers [tokens - 1, num_layers, k] (vLLM's
                `CompletionOutput.routed_experts`), or the same numbers flat, as little-endian bytes, as base64 of these
                bytes (SGLang's `meta_info["routed_experts"]`), or as base64 of an .npy file (vLLM's server).
            num_layers: the layers in the engine's array: of the model with its dense layers, or those with experts only
                (vLLM 0.21).
            k, num_experts: those of every layer with experts.
            dense_layers: layers without experts, which the tape leaves out; the engine's values for them are ignored.
            length: tokens per sequence in the tape; default: those of the longest sequence.
            starts: for each sequence the number of first tokens that the engine left out (SGLang's
                `routed_experts_start_len`, vLLM's `routed_experts_prompt_start`); they choose afresh.
            bytes_dtype: "int32", "int16", "uint16" or "uint8", of bytes and base64 that are no .npy file.
            dtype: of the tape.

        Returns:
            A checked tape [layers with experts, sequences, length, k].

        Raises:
            ValueError: sizes that do not fit, a layer that was not captured (all zeros), or rows that are not a choice
                of experts; the error names sequence, layer and token.

        Source: arXiv 2510.11370; https://docs.vllm.ai/en/latest/training/routed_experts; SGLang's pull requests 12162
        and 31219.

        >>> import numpy as np, jaxlowprec as jlp
        >>> first = np.asarray([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], np.int32)  # 2 tokens + 1, layer 0 dense
        >>> tape = jlp.moe.RoutingTape.from_routed_experts(
        ...     [first, first[:1].tobytes()], num_layers=2, k=2, num_experts=4, dense_layers=[0]
        ... )
        >>> tape.experts.tolist()
        [[[[3, 1], [2, 0], [-1, -1]], [[3, 1], [-1, -1], [-1, -1]]]]
        """
        who = "routed_experts"
        num_experts = whole_number(who, "num_experts", num_experts, 1)
        found = tape_dtype(who, dtype)
        known = captured(sequences, num_layers, k, dense_layers, bytes_dtype)
        if starts is not None and not isinstance(starts, list | tuple | range | np.ndarray):
            raise TypeError(f"{who}: starts={shown(starts)}; needs a list with a number for each sequence")
        begins = [0] * len(known) if starts is None else [whole_number(who, "starts", start, 0) for start in starts]
        if len(begins) != len(known):
            raise ValueError(f"{who}: {len(begins)} starts of {len(known)} sequences; needs one for each")
        longest = max((start + len(rows) + 1 for start, rows in zip(begins, known, strict=True)), default=0)
        length = longest if length is None else whole_number(who, "length", length, 0)
        if length < longest:
            raise ValueError(f"{who}: a sequence has {longest} tokens; needs length={longest} or more")
        layers = num_layers - len(set(dense_layers))
        experts = np.full((layers, len(known), length, k), AFRESH, np.int32)
        for i, (start, rows) in enumerate(zip(begins, known, strict=True)):
            experts[:, i, start : start + len(rows)] = rows.swapaxes(0, 1)
        _check(who, experts, num_experts)
        check_fits(who, found, num_experts, k)
        return cls(as_array(narrowed(experts, found, num_experts)))

    def to_routed_experts(
        self,
        *,
        num_layers: int | None = None,
        dense_layers: Sequence[int] = (),
        lengths: Sequence[int] | None = None,
        form: Form = "array",
        dtype: str = "int32",
    ) -> list[np.ndarray] | list[str]:
        """The tape as an engine would have returned it: the inverse of `from_routed_experts`, on the host.

        Arguments:
            num_layers: the layers of the engine's model, dense layers included; default: those of the tape and of
                dense_layers.
            dense_layers: layers without experts, which the result has as zeros.
            lengths: tokens of each sequence; default: up to its last choice, and one token that the engine never runs.
            form: "array": a NumPy array; "base64": SGLang's; "npy": base64 of an .npy file, as vLLM's server sends it.
            dtype: "int32", "int16", "uint16" or "uint8", of the result.

        Returns:
            For each sequence [tokens - 1, num_layers, k], in that form.

        Raises:
            TypeError: the experts are not known yet (within jit).
            ValueError: the tape is not [layers, sequences, length, k]; sizes do not fit; or a token before the last one
                chooses afresh, for which engines have no number: the error names layer, sequence and token.

        >>> import jax.numpy as jnp, jaxlowprec as jlp
        >>> tape = jlp.moe.RoutingTape(jnp.asarray([[[[3, 1], [2, 0], [-1, -1]]]], jnp.int32))
        >>> tape.to_routed_experts(dense_layers=[0])[0].tolist()
        [[[0, 0], [3, 1]], [[0, 0], [2, 0]]]
        >>> tape.to_routed_experts(form="base64", dtype="uint8")
        ['AwECAA==']
        """
        return encoded(self._known("to_routed_experts"), num_layers, dense_layers, lengths, form, dtype)

    def astype(self, dtype: Any, *, num_experts: int) -> RoutingTape:
        """The tape in another dtype; works within jit. An invalid row stays invalid.

        Arguments:
            dtype: "int32"; "int16", which takes up to 32768 experts; or "uint8", which takes 256, with k = 1 254.
            num_experts: the number of experts of every layer.

        Raises:
            ValueError: the experts do not fit.

        >>> import jaxlowprec as jlp
        >>> tape = jlp.moe.RoutingTape.afresh(2, 3, k=2)
        >>> narrow = tape.astype("uint8", num_experts=256)
        >>> narrow.experts.dtype, narrow.experts[0, 0].tolist(), narrow.astype("int32", num_experts=256)[0][0].tolist()
        (dtype('uint8'), [255, 255], [-1, -1])
        """
        who = "RoutingTape.astype"
        check_experts(who, self.experts)
        found, num_experts = tape_dtype(who, dtype), whole_number(who, "num_experts", num_experts, 1)
        check_fits(who, found, num_experts, self.experts.shape[-1])
        if found == self.experts.dtype:
            return self
        return RoutingTape(narrowed(widened(self.experts), found, num_experts))

    def to_host(self) -> RoutingTape:
        """The tape in the host's pinned memory, sharded as it is; also within jit. `route` fetches what it uses.

        Raises:
            ValueError: the devices have no pinned host memory.

        >>> import jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.afresh(2, 3, k=2).to_host().experts.sharding.memory_kind
        'pinned_host'
        """
        return self._moved(jax.memory.Space.Host, "pinned_host")

    def to_device(self) -> RoutingTape:
        """The tape in the devices' memory.

        >>> import jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.afresh(2, 3, k=2).to_host().to_device().experts.sharding.memory_kind
        'device'
        """
        return self._moved(jax.memory.Space.Device, "device")

    def _moved(self, space: Any, kind: str) -> RoutingTape:
        who = "RoutingTape.to_host" if kind == "pinned_host" else "RoutingTape.to_device"
        check_experts(who, self.experts)
        experts = as_array(self.experts)
        if isinstance(experts, jax.core.Tracer):
            return RoutingTape(jax.device_put(experts, space))
        for device in experts.devices():
            kinds = [memory.kind for memory in device.addressable_memories()]
            if kind not in kinds:
                raise ValueError(
                    f"{who}: {device} has memories {', '.join(kinds)}; needs {kind}: keep the tape where it is, "
                    "as int16 or uint8 by astype"
                )
        return RoutingTape(jax.device_put(experts, experts.sharding.with_memory_kind(kind)))

    def _known(self, who: str) -> np.ndarray:
        """The experts as int32 on the host."""
        if isinstance(self.experts, jax.core.Tracer):
            raise TypeError(f"{who}: the tape's experts are not known within jit; call it before or after the pass")
        check_experts(who, self.experts)
        return widened(np.asarray(self.experts))

    def __getitem__(self, layer: int) -> Int[Array, "*T k"]:
        """The tape of one layer, as a layer takes it. Raises IndexError out of range, where JAX would take the last."""
        if isinstance(layer, int) and not -len(self) <= layer < len(self):
            raise IndexError(f"RoutingTape: layer {layer} of {len(self)}; needs one from 0 on and below that")
        return self.experts[layer]

    def __len__(self) -> int:
        """The number of layers."""
        return self.experts.shape[0]

    def __repr__(self) -> str:
        shape: tuple[int, ...] = getattr(self.experts, "shape", ())  # a transformation may have put any leaf there
        if len(shape) < 3:
            return f"RoutingTape({self.experts})"
        tokens = "x".join(map(str, shape[1:-1]))
        return f"RoutingTape({shape[0]} layers, {tokens} tokens, k={shape[-1]})"

    def check(
        self, num_experts: int, *, layers: int | None = None, tokens: int | tuple[int, ...] | None = None
    ) -> None:
        """Raises if replaying the tape would not do what it says; call it on the host, before the pass.

        Arguments:
            num_experts: the number of experts of every layer.
            layers, tokens: the sizes of the pass, if they are to be checked.

        Raises:
            TypeError: experts are not of a tape's dtype, or their values are not known yet (within jit).
            ValueError: a shape or a number of experts that does not fit; an expert out of range or twice, or -1 beside
                others in a row; the error names layer and token.

        >>> import jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.afresh(2, 8, k=1).check(num_experts=4, layers=2, tokens=8)
        """
        who = "RoutingTape"
        experts = self._known(who)
        num_experts = whole_number(who, "num_experts", num_experts, 1)
        check_fits(who, self.experts.dtype, num_experts, experts.shape[-1])
        layers = None if layers is None else whole_number(who, "layers", layers, 0)
        expected_tokens = None if tokens is None else _as_sizes(who, tokens)
        if layers not in (None, experts.shape[0]) or expected_tokens not in (None, experts.shape[1:-1]):
            raise ValueError(
                f"RoutingTape: it has {experts.shape[0]} layers and tokens {experts.shape[1:-1]}; needs those of the "
                f"pass, {layers} and {expected_tokens}: replay the batch that was recorded"
            )
        _check(who, experts, num_experts)


def check_experts(who: str, experts: Any) -> None:
    """Raises unless the experts are [layers, *tokens, k] of a tape's dtype."""
    if not isinstance(experts, jax.Array | np.ndarray):
        raise TypeError(f"{who}: experts are {shown(experts)}; needs an int32 array [layers, *tokens, k]")
    if not is_tape_dtype(experts.dtype):
        raise TypeError(f"{who}: experts are {experts.dtype}; needs int32, int16 or uint8")
    if experts.ndim < 3:
        raise ValueError(f"{who}: experts have shape {experts.shape}; needs [layers, *tokens, k]")


def _as_sizes(who: str, tokens: Any) -> tuple[int, ...]:
    """One size, or the sizes of several axes, as a tuple."""
    sizes = tokens if isinstance(tokens, tuple | list) else (tokens,)
    return tuple(whole_number(who, "tokens", size, 0) for size in sizes)


def _check(who: str, experts: np.ndarray, num_experts: int) -> None:
    """Raises ValueError at the first row of int32 [layers, *tokens, k] that is not a choice of experts."""
    ordered = np.sort(experts, axis=-1)
    afresh = (experts == AFRESH).all(-1)
    faults = {
        "-1 for the whole row, or for none of it": (experts == AFRESH).any(-1),
        "ids of 0 or more": (experts < 0).any(-1),
        f"ids below {num_experts}, the number of experts": (experts >= num_experts).any(-1),
        "each expert once": (ordered[..., 1:] == ordered[..., :-1]).any(-1),
    }
    for needed, found in faults.items():
        found = found & ~afresh
        if found.any():
            layer, *token = (int(i) for i in np.argwhere(found)[0])
            row = experts[(layer, *token)].tolist()
            where = token[0] if len(token) == 1 else tuple(token)
            raise ValueError(f"{who}: layer {layer}, token {where} has experts {row}; needs {needed}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overlap:
    """How far two tapes agree, per layer; NaN in a layer without a token to compare. A pytree.

    Attributes:
        tokens: int32 [layers]: the number of compared tokens, for which both tapes hold a choice.
        same_set: float32 [layers]: share of them with the same experts, in any order.
        same_order: float32 [layers]: share of them with the same experts in the same order.
        intersection: float32 [layers]: share of a token's k experts that both tapes have, on average.
    """

    tokens: Int32[Array, "L"]
    same_set: Float[Array, "L"]
    same_order: Float[Array, "L"]
    intersection: Float[Array, "L"]


def overlap(a: RoutingTape, b: RoutingTape) -> Overlap:
    """Compares the choices of two tapes of the same tokens. Works within jit.

    Raises:
        TypeError: an argument is not a tape.
        ValueError: tapes of different shapes.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> a = jlp.moe.RoutingTape(jnp.asarray([[[0, 1], [2, 3], [-1, -1]]], jnp.int32))
    >>> b = jlp.moe.RoutingTape(jnp.asarray([[[0, 1], [3, 4], [1, 2]]], jnp.int32))
    >>> found = jlp.moe.overlap(a, b)
    >>> found.tokens.tolist(), found.same_set.tolist(), found.same_order.tolist(), found.intersection.tolist()
    ([2], [0.5], [0.5], [0.75])
    """
    for tape in (a, b):
        if not isinstance(tape, RoutingTape):
            raise TypeError(f"overlap: needs two tapes; one is a {type(tape).__name__}: RoutingTape(experts) makes one")
    for tape in (a, b):
        check_experts("overlap", tape.experts)
    if a.experts.shape != b.experts.shape:
        raise ValueError(
            f"overlap: tapes of shapes {a.experts.shape} and {b.experts.shape}; needs the same layers, tokens and k"
        )
    layers, *tokens_axes, k = a.experts.shape
    first, second = (widened(tape.experts).reshape(layers, math.prod(tokens_axes), k) for tape in (a, b))
    compared = jnp.all(first != AFRESH, axis=-1) & jnp.all(second != AFRESH, axis=-1)
    common = jnp.sum(first[..., :, None] == second[..., None, :], axis=(-2, -1))
    same_order = jnp.all(first == second, axis=-1)
    tokens = jnp.sum(compared, axis=-1, dtype=jnp.int32)

    def share(values: Array) -> Array:
        return jnp.sum(jnp.where(compared, values.astype(jnp.float32), 0.0), axis=-1) / tokens.astype(jnp.float32)

    return Overlap(tokens, share(common == k), share(same_order), share(common) / k)
