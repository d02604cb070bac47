"""The op of rows in groups, in high precision, by quantised weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.checks import Implementation, choose
from jaxlowprec.ops.grouped_matmul import chunks, ragged
from jaxlowprec.ops.grouped_matmul import reference as grouped
from jaxlowprec.ops.grouped_matmul.op import bias_of_rows
from jaxlowprec.ops.grouped_matmul.quantize_op import over_batches
from jaxlowprec.ops.weight_only_matmul import reference
from jaxlowprec.ops.weight_only_matmul.op import weight_factors


@dataclasses.dataclass(frozen=True)
class GroupedWeightOnlySpec:
    """One variant of the op.

    Attributes:
        format, ragged_columns, ragged_depth: see `WeightOnlySpec`.
        bias: whether there is one.
        out_dtype: of the result.
    """

    format: Format
    ragged_columns: bool
    ragged_depth: bool
    bias: bool
    out_dtype: jax.typing.DTypeLike

    @property
    def weights(self) -> int:
        """How many operands the weights are: data, scale, amax or zero points."""
        return 2 + (self.format.scaling == "two_level") + self.format.has_zero_point


def grouped_weight_only(
    x: jax.Array,
    q: QuantizedArray,
    sizes: jax.Array,
    bias: jax.Array | None,
    out_dtype: jax.typing.DTypeLike,
    implementation: Implementation = None,
) -> jax.Array:
    """x [..., T, K] in groups, q [..., E, N, K] quantised along K, sizes [..., E] -> [..., T, N].

    Rows in no group give zeros. The bias is float32 [..., E, N]. The bytes are those of `scaled_matmul(x_e, q_e)` for
    each group.
    """
    columns, depth = q.matrix_shape
    fmt = q.format
    spec = GroupedWeightOnlySpec(
        fmt,
        fmt.tiles and columns % fmt.length != 0,
        depth % fmt.length != 0 or (fmt.packed and fmt.length % 2 != 0),
        bias is not None,
        jnp.dtype(out_dtype),
    )
    weight = [leaf for leaf in (q.data, q.scale, q.amax, q.zero_point) if leaf is not None]
    return grouped_weight_only_op(spec, implementation)(x, *weight, sizes, *([] if bias is None else [bias]))[0]


@functools.cache
def grouped_weight_only_op(spec: GroupedWeightOnlySpec, implementation: Implementation) -> wiring.Op:
    """x [..., T, K], the weights' leaves [..., E, ...], sizes [..., E], a float32 bias [..., E, N] -> [..., T, N]."""
    fmt, last = spec.format, 1 + spec.weights
    weight = weight_factors(fmt, spec.ragged_columns, spec.ragged_depth, "... e")
    operands = [f"... t {weight.k}", *weight.operands, "... e", *[f"... e {weight.n}"] * spec.bias]
    text = f"{', '.join(operands)} -> ... t {weight.n}"

    def outputs(x: jax.Array, data: jax.Array, *_: jax.Array) -> wiring.Shapes:
        return [((*x.shape[:-1], data.shape[-2]), spec.out_dtype)]

    def one_batch(x: jax.Array, sizes: jax.Array, data: jax.Array, scale: jax.Array, *rest: jax.Array) -> jax.Array:
        rows_of = grouped.chunk_of(x)
        amax = rest[0] if fmt.scaling == "two_level" else None
        zero_point = rest[0] if fmt.has_zero_point else None

        def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
            zeros = None if zero_point is None else zero_point[group]
            w = reference.decoded(data[group], scale[group], zeros, fmt)
            factor = reference.alpha(scale[group], None if amax is None else amax[group], fmt)
            y = reference.apply_alpha(reference.products(rows_of(row), w), factor)
            return y + rest[-1][group] if spec.bias else y

        return grouped.by_chunks(sizes, x.shape[0], data.shape[-2], spec.out_dtype, multiply)

    def run_reference(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        weight, sizes, bias = rest[: spec.weights], rest[spec.weights], rest[last:]
        return [over_batches(one_batch)(x, sizes, *weight, *bias)]

    def run_native(*operands: jax.Array) -> Sequence[jax.Array]:
        ((shape, dtype),) = outputs(*operands)
        call = jax.ffi.ffi_call("jaxlowprec_grouped_weight_only", jax.ShapeDtypeStruct(shape, dtype))
        weight, sizes, extras = operands[1:last], operands[last], operands[last + 1 :]
        x, (data, scale, *others) = operands[0], weight
        attributes = {"format": fmt.attributes, "asymmetric": fmt.has_zero_point, "bias": spec.bias}
        return [call(x, data, scale, sizes, *others, *extras, **attributes)]

    def run_by_chunks(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        weight, sizes, bias = rest[: spec.weights], rest[spec.weights], rest[last:]
        return [over_batches(functools.partial(chunks.weight_only, spec, implementation))(x, sizes, *weight, *bias)]

    def run_on_tpu(x: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        weight, sizes, bias = rest[: spec.weights], rest[spec.weights], rest[last:]
        return [over_batches(functools.partial(ragged.weight_only, spec))(x, sizes, *weight, *bias)]

    def when_reduced(add_up: wiring.AddUp, *operands: jax.Array) -> Sequence[jax.Array]:
        plain = dataclasses.replace(spec, bias=False, out_dtype=jnp.dtype("float32"))
        total = add_up(grouped_weight_only_op(plain, implementation)(*operands[: last + 1])[0])
        if spec.bias:
            total = total + bias_of_rows(operands[last + 1], operands[last], total.shape[-2])
        return [total.astype(spec.out_dtype)]

    return wiring.define(
        "jaxlowprec_grouped_weight_only",
        rule=wiring.ShardingRule(
            text,
            reductions=("k",) if weight.depth_splits else (),
            whole=(*weight.whole, "t", "e"),
            **weight.sizes,
        ),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_by_chunks},
        portable={None: run_by_chunks, "tpu": run_on_tpu},
        when_reduced=when_reduced,
        **choose("grouped_matmul", implementation),
    )
