"""The op of the GEMM of activations in high precision with a quantised weight, and the op of its gradient.

The gradient with respect to the activations is dy times the decoded weight. XLA multiplies. It is an op so that a mesh
that gathers the weight sends its codes, which each device decodes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.epilogue import Epilogue
from jaxlowprec.ops.weight_only_matmul import cuda, portable, reference
from jaxlowprec.wiring.sharding_rule import resharded, spec_of


@dataclasses.dataclass(frozen=True)
class WeightOnlySpec:
    """One variant of the op.

    Attributes:
        format: of the weight.
        ragged_columns: N is not a multiple of its square tiles.
        ragged_depth: K is not a multiple of its block, or a block is not a whole number of bytes.
        shared: one weight for all batch axes of the activations, else one for each.
        epilogue: the operations after the sums.
    """

    format: Format
    ragged_columns: bool
    ragged_depth: bool
    shared: bool
    epilogue: Epilogue

    @property
    def two_level(self) -> bool:
        """Whether the weight has an amax."""
        return self.format.scaling == "two_level"

    @property
    def weights(self) -> int:
        """The number of operands of the weight: data, scale, amax or zero points."""
        return 2 + self.two_level + self.format.has_zero_point


@dataclasses.dataclass(frozen=True)
class WeightFactors:
    """A weight [N, K] in a wiring rule.

    Attributes:
        n, k: its logical dimensions.
        operands: its arrays.
        whole, sizes: of the rule.
        depth_splits: whether K is split into whole blocks; else not at all.
    """

    n: str
    k: str
    operands: list[str]
    whole: tuple[str, ...]
    sizes: dict[str, int]
    depth_splits: bool


def weight_factors(
    fmt: Format, ragged_columns: bool, ragged_depth: bool, batch: str, columns: str = "n"
) -> WeightFactors:
    """N splits (into whole tiles, if there are tiles), K into whole blocks; `batch` is "..." or "".

    `columns`: the name of N's factor.
    """
    whole: list[str] = []
    n = scale_n = columns
    if fmt.tiles and ragged_columns:
        scale_n = f"{columns}blocks"
        whole += [n, scale_n]
    elif fmt.tiles:
        n = f"({columns} b)"
    if fmt.scaling == "tensor":
        k, operands = "k", [f"{batch} {n} k", batch]
    elif fmt.scaling == "rows":
        k, operands, whole = "k", [f"{batch} {n} k", f"{batch} {n} one"], ["one"]
    elif ragged_depth:
        k, code = "kelements", "kbytes" if fmt.packed else "kelements"
        whole += dict.fromkeys((k, code, "kblocks"))
        operands = [f"{batch} {n} {code}", f"{batch} {scale_n} kblocks"]
    else:
        code = "k" if fmt.packed and fmt.length == 2 else f"(k {'h' if fmt.packed else 'b'})"
        k, operands = "(k b)", [f"{batch} {n} {code}", f"{batch} {scale_n} k"]
    operands += [batch] * (fmt.scaling == "two_level")
    operands += [f"{batch} {scale_n} {'kblocks' if ragged_depth else 'k'}"] * fmt.has_zero_point
    text = ", ".join([n, k, *operands])
    sizes = {f: size for f, size in (("b", fmt.length), ("h", fmt.length // 2)) if f" {f})" in text}
    return WeightFactors(n, k, operands, tuple(dict.fromkeys(whole)), sizes, not ragged_depth)


def _rule(spec: WeightOnlySpec) -> wiring.ShardingRule:
    """M and N split; K splits into whole blocks and is then summed over."""
    batch = "" if spec.shared else "..."
    weight = weight_factors(spec.format, spec.ragged_columns, spec.ragged_depth, batch)
    extras = spec.epilogue.operands("m", weight.n)
    if spec.shared and spec.epilogue.bias:
        extras[0] = weight.n
    results = spec.epilogue.results("m", weight.n)
    text = f"{', '.join([f'... m {weight.k}', *weight.operands, *extras])} -> {', '.join(results)}"
    reductions = ("k",) if weight.depth_splits else ()
    return wiring.ShardingRule(text, reductions=reductions, whole=weight.whole, **weight.sizes)


def _named(
    spec: WeightOnlySpec, data: jax.Array, scale: jax.Array, *rest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """data, scale, amax, zero points, the last two None where the format has none."""
    left = list(rest)
    return data, scale, left.pop(0) if spec.two_level else None, left.pop(0) if spec.format.has_zero_point else None


def by_reference(spec: WeightOnlySpec, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The op in pure JAX."""
    data, scale, amax, zero_point = _named(spec, *operands[: spec.weights])
    sums = reference.products(x, reference.decoded(data, scale, zero_point, spec.format))
    sums = reference.apply_alpha(sums, reference.alpha(scale, amax, spec.format))
    return spec.epilogue.finish(sums, operands[spec.weights :])


def by_cuda(
    spec: WeightOnlySpec, implementation: Implementation, x: jax.Array, *operands: jax.Array
) -> list[jax.Array]:
    """The op on NVIDIA GPUs."""
    weight, extras = operands[: spec.weights], operands[spec.weights :]
    if 0 in (*x.shape, *weight[0].shape):
        return by_reference(spec, x, *operands)  # nothing to multiply
    problem = cuda.why_not(spec, x, weight[1])
    if problem and implementation == "ffi":
        raise NotImplementedError(
            f'scaled_matmul: implementation="ffi": {problem}; with implementation=None XLA multiplies by the '
            "decoded weight"
        )
    if problem:
        return by_xla(spec, x, *operands)
    return cuda.matmul(spec, x, *_named(spec, *weight), extras)


def by_xla(spec: WeightOnlySpec, x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """The op as one product with the decoded weight."""
    weight, extras = operands[: spec.weights], operands[spec.weights :]
    return portable.decoded_matmul(spec, x, *_named(spec, *weight), extras)


@functools.cache
def weight_only_op(spec: WeightOnlySpec, implementation: Implementation) -> wiring.Op:
    """x [..., M, K]; the weight as data [..., N, bytes], scale and, where its format has them, amax [...] and zero
    points; then the epilogue's operands -> [..., M, N], and the pre-activation.

    A shared weight and its bias [N] have no batch axes.
    """
    last = 1 + spec.weights

    def outputs(x: jax.Array, data: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return spec.epilogue.outputs((*x.shape[:-1], data.shape[-2]))

    def run_native(x: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        """With a shared weight the batch axes of x are rows."""
        weight, extras = operands[: spec.weights], list(operands[spec.weights :])
        lead = x.shape[:-1]

        def folded(matrix: jax.Array) -> jax.Array:
            return matrix.reshape(math.prod(lead), matrix.shape[-1]) if spec.shared else matrix

        x = folded(x)
        extras[spec.epilogue.bias :] = map(folded, extras[spec.epilogue.bias :])
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, *weight)]
        attributes = {"format": spec.format.attributes, "asymmetric": spec.format.has_zero_point}
        call = jax.ffi.ffi_call("jaxlowprec_weight_only_matmul", results)
        out = call(x, *weight, *extras, **attributes, **spec.epilogue.attributes)
        return [y.reshape(*lead, y.shape[-1]) for y in out]

    def when_reduced(add_up: wiring.AddUp, *operands: jax.Array) -> Sequence[jax.Array]:
        """If K is split, partial sums (scales applied) are added up in float32 before the rest of the epilogue."""
        plain = dataclasses.replace(spec, epilogue=spec.epilogue.accumulators_only)
        (partial,) = weight_only_op(plain, implementation)(*operands[:last])
        return spec.epilogue.finish(add_up(partial), operands[last:])

    wired = wiring.define(
        "jaxlowprec_weight_only_matmul",
        rule=_rule(spec),
        outputs=outputs,
        reference=functools.partial(by_reference, spec),
        portable=functools.partial(by_xla, spec),
        native={"cpu": run_native, "cuda": functools.partial(by_cuda, spec, implementation)},
        when_reduced=when_reduced,
        out_spec=spec.epilogue.out_spec,
        **choose("scaled_matmul", implementation),
    )
    if not spec.shared:
        return wired

    # If only the activations are mapped, the mapped axis holds more rows; if the weight is mapped, it is not shared.
    op = custom_vmap(lambda *operands: wired(*operands))

    @op.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        own = any(batched[1:last]) or (spec.epilogue.bias and batched[last])
        shared = 0 if own else spec.weights + spec.epilogue.bias
        widened = [
            value if mapped or 1 <= i <= shared else jnp.broadcast_to(value, (size, *value.shape))
            for i, (value, mapped) in enumerate(zip(operands, batched, strict=True))
        ]
        if not own:
            out = op(*widened)
            return out, (True,) * len(out)
        lead = widened[0].shape[1:-1]
        matrices = [0, *range(last + spec.epilogue.bias, len(widened))]
        for i in matrices:
            widened[i] = widened[i].reshape(size, math.prod(lead), widened[i].shape[-1])
        out = weight_only_op(dataclasses.replace(spec, shared=False), implementation)(*widened)
        return tuple(y.reshape(size, *lead, y.shape[-1]) for y in out), (True,) * len(out)

    return op


def weight_only_dgrad(
    dy: Float[Array, "*B M N"],
    q: QuantizedArray,
    out_dtype: jax.typing.DTypeLike,
    out_sharding: Any,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*B M K"]:
    """dy @ q, accumulated in float32; the weight is decoded to dy's dtype.

    Arguments:
        dy: [..., M, N]; [..., S, M, N], rows split, for a weight without S.
        q: [..., N, K], quantised along K.
        out_dtype, out_sharding: of the result, see `scaled_matmul`.
        precision: of the product, as for `jax.lax.dot`; hashable.
    """
    fmt, (rows, depth) = q.format, q.matrix_shape
    ragged_depth = depth % fmt.length != 0 or (fmt.packed and fmt.length % 2 != 0)
    op = _dgrad_op(
        fmt,
        fmt.tiles and rows % fmt.length != 0,
        depth if ragged_depth else None,
        dy.ndim > q.ndim,
        jnp.dtype(out_dtype),
        spec_of(out_sharding),
        precision,
    )
    (dx,) = op(dy, *(leaf for leaf in (q.data, q.scale, q.amax, q.zero_point) if leaf is not None))
    return resharded(dx, out_sharding)


@functools.cache
def _dgrad_op(
    fmt: Format,
    ragged_columns: bool,
    ragged_depth: int | None,
    rows_split: bool,
    out_dtype: jax.typing.DTypeLike,
    out_spec: PartitionSpec | None,
    precision: jax.lax.PrecisionLike,
) -> wiring.Op:
    """dy, and the weight as `weight_only_op` takes it -> dx. `ragged_depth`: K where it does not follow from the
    shapes, else None."""
    weight = weight_factors(fmt, ragged_columns, ragged_depth is not None, "...")
    lines = "s m" if rows_split else "m"
    text = f"{', '.join([f'... {lines} {weight.n}', *weight.operands])} -> ... {lines} {weight.k}"
    reductions = () if "n" in weight.whole else ("n",)

    def depth(data: jax.Array, scale: jax.Array) -> int:
        if ragged_depth is not None:
            return ragged_depth
        return data.shape[-1] if fmt.scaling in ("tensor", "rows") else scale.shape[-1] * fmt.length

    def outputs(dy: jax.Array, data: jax.Array, scale: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [((*dy.shape[:-1], depth(data, scale)), out_dtype)]

    def multiply(
        dy: jax.Array, data: jax.Array, scale: jax.Array, *rest: jax.Array, dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        amax = rest[0] if fmt.scaling == "two_level" else None
        zero_point = rest[-1] if fmt.has_zero_point else None
        matrix = (data.shape[-2], depth(data, scale))
        w = QuantizedArray(data, scale, amax, zero_point, fmt, matrix, dy.dtype, -1, None)
        decoded = dequantize(w)[..., None, :, :] if rows_split else dequantize(w)
        y = jnp.matmul(dy, decoded, precision=precision, preferred_element_type=jnp.float32)
        return y.astype(dtype)

    return wiring.define(
        "jaxlowprec_weight_only_dgrad",
        rule=wiring.ShardingRule(text, reductions=reductions, whole=weight.whole, **weight.sizes),
        outputs=outputs,
        reference=lambda *operands: [multiply(*operands, dtype=out_dtype)],
        when_reduced=lambda add_up, *operands: [add_up(multiply(*operands, dtype=jnp.float32)).astype(out_dtype)],
        out_spec=out_spec,
    )
