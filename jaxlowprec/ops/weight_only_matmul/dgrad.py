"""The gradient of a weight-only product with respect to its activations: dy times the decoded weight.

XLA multiplies. It is an op so that a mesh that gathers the weight sends its codes, which each device decodes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.dequantize.api import dequantize
from jaxlowprec.ops.weight_only_matmul.op import weight_factors
from jaxlowprec.wiring.out_sharding import resharded, spec_of


def weight_only_dgrad(
    dy: Float[Array, "*B M N"], q: QuantizedArray, out_dtype: Any, out_sharding: Any, precision: Any = None
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
    out_dtype: Any,
    out_spec: PartitionSpec | None,
    precision: Any,
):
    """dy, and the weight as `weight_only_op` takes it -> dx. `ragged_depth`: K where it does not follow from the
    shapes, else None."""
    weight = weight_factors(fmt, ragged_columns, ragged_depth is not None, "...")
    lines = "s m" if rows_split else "m"
    text = f"{', '.join([f'... {lines} {weight.n}', *weight.operands])} -> ... {lines} {weight.k}"
    reductions = () if "n" in weight.whole else ("n",)

    def depth(data, scale):
        if ragged_depth is not None:
            return ragged_depth
        return data.shape[-1] if fmt.scaling == "tensor" else scale.shape[-1] * fmt.length

    def outputs(dy, data, scale, *_):
        return [((*dy.shape[:-1], depth(data, scale)), out_dtype)]

    def multiply(dy, data, scale, *rest, dtype):
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
