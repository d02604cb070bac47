"""The record of a model's routing: recorded in one pass, replayed in another, checked on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxlowprec.arguments import array, shown, whole_number
from jaxlowprec.moe.rollout import captured
from jaxlowprec.moe.router import AFRESH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingTape:
    """The experts of every token in every layer of a model. A pytree with one leaf.

    No layer keeps it as state: a pass takes it as an argument and returns the one it used. Under jit, remat and
    sharding it is an operand like any other; `jax.lax.scan` over layers takes `tape.experts` as xs and returns one as
    ys.

    Attributes:
        experts: int32 [layers, *tokens, k], in the order in which a token's outputs are summed; a row of -1 chooses
            afresh. The axes of tokens are those of the activations, such as [batch, time].

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> tape = jlp.moe.RoutingTape(jnp.asarray([[[0, 1], [2, 0]], [[1, 3], [-1, -1]]], jnp.int32))
    >>> tape, tape[1].tolist()
    (RoutingTape(2 layers, 2 tokens, k=2), [[1, 3], [-1, -1]])
    >>> tape.check(num_experts=3)
    Traceback (most recent call last):
    ValueError: RoutingTape: layer 1, token 0 has experts [1, 3]; needs ids below 3, the number of experts
    """

    experts: Int32[Array, "L *T k"]

    @classmethod
    def afresh(cls, layers: int, tokens: int | tuple[int, ...], k: int) -> RoutingTape:
        """A tape with which every token chooses afresh; use it to record with the program that replays.

        >>> import jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.afresh(2, (4, 16), k=2).experts.shape
        (2, 4, 16, 2)
        """
        who = "RoutingTape.afresh"
        sizes = (whole_number(who, "layers", layers, 0), *_as_sizes(who, tokens), whole_number(who, "k", k, 1))
        if math.prod(sizes) >= 2**31:
            raise ValueError(f"{who}: {sizes} are 2^31 choices or more; needs fewer")
        return cls(jnp.full(sizes, AFRESH, jnp.int32))

    @classmethod
    def of_layers(cls, layers: Sequence[Int32[Array, "*T k"]]) -> RoutingTape:
        """The tape of layers that are run one by one: `[aux.tape for each]`.

        >>> import jax.numpy as jnp, jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.of_layers([jnp.zeros((8, 1), jnp.int32)] * 3)
        RoutingTape(3 layers, 8 tokens, k=1)
        """
        who = "RoutingTape.of_layers"
        listed = isinstance(layers, list | tuple) or (isinstance(layers, jax.Array | np.ndarray) and layers.ndim > 0)
        if not listed or not len(layers):
            raise TypeError(f"{who}: layers={shown(layers)}; needs an int32 array [*tokens, k] for each layer")
        found = [array(who, f"layers[{i}]", layer) for i, layer in enumerate(layers)]
        if len({layer.shape for layer in found}) > 1 or any(layer.dtype != jnp.int32 for layer in found):
            kinds = ", ".join(f"{layer.dtype}{list(layer.shape)}" for layer in found)
            raise ValueError(f"{who}: layers are {kinds}; needs int32 of one shape [*tokens, k]")
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
    ) -> RoutingTape:
        """The routing that a rollout engine used, as SGLang returns it in `meta_info["routed_experts"]`.

        An engine never runs a sequence's last token, so it chooses afresh, as do the places that pad shorter sequences.

        Arguments:
            sequences: for each sequence int32 [tokens - 1, num_layers, k], or the same numbers flat, as little-endian
                bytes, or as base64 of these bytes.
            num_layers: the layers of the engine's model, dense layers included.
            k, num_experts: those of every layer with experts.
            dense_layers: layers without experts, which the tape leaves out; the engine's values for them are ignored.
            length: tokens per sequence in the tape; default: those of the longest sequence.

        Returns:
            A checked tape [layers with experts, sequences, length, k].

        Raises:
            ValueError: sizes that do not fit, a layer that was not captured (all zeros), or rows that are not a choice
                of experts; the error names sequence, layer and token.

        Source: arXiv 2510.11370.

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
        known = captured(sequences, num_layers, k, dense_layers)
        longest = max((len(rows) + 1 for rows in known), default=0)
        length = longest if length is None else whole_number(who, "length", length, 0)
        if length < longest:
            raise ValueError(f"{who}: a sequence has {longest} tokens; needs length={longest} or more")
        layers = num_layers - len(set(dense_layers))
        experts = np.full((layers, len(known), length, k), AFRESH, np.int32)
        for i, rows in enumerate(known):
            experts[:, i, : len(rows)] = rows.swapaxes(0, 1)
        _check(who, experts, num_experts)
        return cls(jnp.asarray(experts))

    def __getitem__(self, layer: int) -> Int32[Array, "*T k"]:
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
            TypeError: experts is not int32, or its values are not known yet (within jit).
            ValueError: a shape that does not fit; an expert out of range or twice, or -1 beside others in a row; the
                error names layer and token.

        >>> import jaxlowprec as jlp
        >>> jlp.moe.RoutingTape.afresh(2, 8, k=1).check(num_experts=4, layers=2, tokens=8)
        """
        who = "RoutingTape"
        if isinstance(self.experts, jax.core.Tracer):
            raise TypeError(f"{who}: its experts are not known within jit; check it before the pass")
        check_experts(who, self.experts)
        num_experts = whole_number(who, "num_experts", num_experts, 1)
        layers = None if layers is None else whole_number(who, "layers", layers, 0)
        experts = np.asarray(self.experts)
        expected_tokens = None if tokens is None else _as_sizes(who, tokens)
        if layers not in (None, experts.shape[0]) or expected_tokens not in (None, experts.shape[1:-1]):
            raise ValueError(
                f"RoutingTape: it has {experts.shape[0]} layers and tokens {experts.shape[1:-1]}; needs those of the "
                f"pass, {layers} and {expected_tokens}: replay the batch that was recorded"
            )
        _check("RoutingTape", experts, num_experts)


def check_experts(who: str, experts: Any) -> None:
    """Raises unless the experts are int32 [layers, *tokens, k]."""
    if not isinstance(experts, jax.Array | np.ndarray):
        raise TypeError(f"{who}: experts are {shown(experts)}; needs an int32 array [layers, *tokens, k]")
    if experts.dtype != np.int32:
        raise TypeError(f"{who}: experts are {experts.dtype}; needs int32")
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
