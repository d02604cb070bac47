"""From a QuantizedArray back to numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.arrays.quantized_array import QuantizedArray, as_matrices, check_quantized
from jaxlowprec.ops.checks import float_dtype
from jaxlowprec.ops.dequantize.op import dequantize_op
from jaxlowprec.ops.hadamard.api import hadamard_transform
from jaxlowprec.ops.implementation import Implementation, check_implementation
from jaxlowprec.ops.int4.api import dequantize_int4


def dequantize(q: QuantizedArray, dtype: Any = None, *, implementation: Implementation = None) -> Float[Array, "..."]:
    """The array that q approximates: its logical shape and original orientation, the rotation undone.

    Codes are decoded (and rotated back) in float32, then rounded once. Int4 is decoded as it is served: rounded once to
    its scale_dtype, then converted to `dtype`, which is exact for float32 and for the scale_dtype.

    Arguments:
        q: a quantised array.
        dtype: of the result: bfloat16, float16 or float32. None: the dtype q was quantised from.
        implementation: None, "ffi" or "reference".

    Raises:
        TypeError: q is not a QuantizedArray, or another dtype than those.
        ValueError: its arrays are not those of its format and shape.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x = jnp.array([[0.5, 1.0, 2.0, 3.0] * 4])
    >>> jlp.dequantize(jlp.quantize(x, jlp.NVFP4()))[0, :4]
    Array([0.5, 1. , 2. , 3. ], dtype=float32)
    """
    who = "dequantize"
    check_quantized(who, "q", q)
    check_implementation(who, implementation)
    dtype = float_dtype(who, "dtype", q.dtype if dtype is None else dtype)
    if q.format.scaling == "float16":
        return dequantize_int4(q, dtype, implementation)
    if q.format.row_scaled and len(q.matrix_shape) == 2:
        values = _dequantize(as_matrices(q), dtype, implementation)[..., 0, :]
        return jnp.swapaxes(values, -1, -2) if q.axis == -2 else values
    return _dequantize(q, dtype, implementation)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation"))
def _dequantize(q: QuantizedArray, dtype: Any, implementation: Implementation) -> jax.Array:
    vector, fmt = len(q.matrix_shape) == 1, q.format
    data = q.data[..., None, :] if vector else q.data
    scale = q.scale[..., None, :] if vector and fmt.scaling != "tensor" else q.scale
    rows, columns = (1, *q.matrix_shape) if vector else (q.matrix_shape if q.axis == -1 else q.matrix_shape[::-1])
    operands = jax.lax.stop_gradient((data, scale) if q.amax is None else (data, scale, q.amax))

    def decode(columns, rotation, dtype):
        ragged_columns = columns if columns % fmt.length else None
        ragged_rows = fmt.tiles and rows % fmt.length != 0
        op = dequantize_op(fmt, ragged_rows, ragged_columns, rotation, jnp.dtype(dtype), implementation)
        return op(*operands)[0]

    if q.hadamard is None or (fmt.scaling == "two_level" and q.hadamard.in_pass):
        values = decode(columns, q.hadamard, dtype)
    else:  # decoded in float32 with its padding to whole transforms, then rotated back
        size, signs = q.hadamard.size, q.hadamard.signs
        values = decode(-(-columns // size) * size, None, jnp.float32)
        options: Any = {"inverse": True, "implementation": implementation, "sign_key": q.signs}
        values = hadamard_transform(values, -1, size, signs, **options)
        values = values[..., :columns].astype(dtype)
    if vector:
        return values[..., 0, :]
    return jnp.swapaxes(values, -1, -2) if q.axis == -2 else values
