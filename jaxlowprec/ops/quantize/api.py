"""Quantisation of arrays: rowwise, columnwise, or both ways in one pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec.arguments import shown
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.hadamard import Hadamard, as_hadamard
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.ops.amax import amax as tensor_amax
from jaxlowprec.ops.amax import largest_over
from jaxlowprec.ops.byte_collectives import names_of
from jaxlowprec.ops.checks import Implementation, last_axis, mesh_axes
from jaxlowprec.ops.hadamard import hadamard_transform, sign_source, signs_of
from jaxlowprec.ops.int4.op import quantize_int4
from jaxlowprec.ops.quantize.checks import (
    Rounding,
    check_length,
    check_plain,
    checked_options,
    checked_roundings,
    draws_bits,
    given_tensor,
    quantizable,
    tensor_batch,
)
from jaxlowprec.ops.quantize.op import (
    QuantizeSpec,
    amaxes_of_lines,
    quantize_op,
    quantized_array,
    quantized_arrays,
    random_operands,
    rotates_in_pass,
    spec_of,
)
from jaxlowprec.ops.quantize.random_bits import random_words
from jaxlowprec.ops.quantize.row_scaled import row_scaled_quantize_op


def quantize(
    x: Float[Array, "*B M K"],
    fmt: Format,
    *,
    axis: int = -1,
    hadamard: bool | Hadamard = False,
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
    amax: Float[Array, "*B"] | None = None,
    implementation: Implementation = None,
    encode_scale: Float[Array, "*B"] | None = None,
    offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
    axis_name: Hashable | None = None,
    rows_split: bool = False,
    sign_key: jax.Array | None = None,
) -> QuantizedArray:
    """Quantises an array along one axis.

    Leading axes are batch axes, each slice with its own amax. Lengths need not be multiples of the block: the last
    block is padded with zeros (for Int4 with pad=True only). Not differentiable: it is a step function, and its
    derivative is taken to be zero.

    Arguments:
        x: [..., M, K] (or a vector [K]), bfloat16, float16 or float32.
        fmt: what to quantise to: NVFP4, MXFP8, MXFP4, Float8Block, Float8Tensor, Float8Rows, Int8Rows or Int4.
        axis: the quantised (contraction) axis: -1 is rowwise; -2 columnwise, stored K-major: the bytes are those of
            `quantize(jnp.swapaxes(x, -1, -2), fmt)`.
        hadamard: rotate along the quantised axis first: True for the default transform, or a `Hadamard`. For both
            operands of one GEMM, in which it cancels.
        rounding: "nearest" (ties to even); "stochastic": codes are rounded stochastically, and scales to nearest, not
            where scales are chosen by their error (`NVFP4.scale_rule`); "eden" (MS-EDEN), for NVFP4 in blocks of
            (1, 16) with `hadamard`: codes are rounded to nearest, and each scale is corrected for its codes' errors and
            rounded stochastically. Over rotations drawn anew that is unbiased, with half the error of "stochastic".
        key: for both: a JAX key of two 32-bit words (threefry2x32), or uint32 [..., 2]; shaped like the batch axes, or
            one for all slices. The bits depend only on the key and each element's place.
        amax: float32, shaped like the batch axes: the largest magnitude to scale by (after the rotation), where it is
            known or must cover more than x. Larger elements saturate. A negative or non-finite amax makes its slice
            NaN. None: x's own. For formats with a tensor scale: NVFP4 and Float8Tensor.
        implementation: None for the best that is available, "ffi" for the native kernel, "portable" for pure JAX as on
            platforms without kernels, "reference" for pure JAX that defines the bytes.
        encode_scale: float32, shaped like the batch axes, for Float8Tensor: the factor to multiply by, instead of one
            from an amax (delayed scaling). Larger elements saturate. The stored scale is its reciprocal. A factor that
            is not positive and finite makes its slice NaN.
        offset: row and column of x's first element in the whole array that random bits should see, for a part of it;
            the column in multiples of 16 (of rows for axis -2). From 0 on and below 2^32; a JAX array is taken modulo
            that.
        axis_name: inside `jax.shard_map`, the mesh axis or axes that x is a shard along: x's own amax is then that of
            the whole array. For Float8Rows and Int8Rows, those along which the lines go on, and their amaxes are those
            of whole lines: leave it out where each device has whole lines. Outside of shard_map a mesh needs no
            argument.
        rows_split: x is [..., S, M, K], one tensor whose rows are split into S parts, with one amax: codes and scales
            are those of the matrix [..., S * M, K], its rows numbered through, but stay in parts, and a mesh may split
            both S and M. For axis -2, M is a multiple of the block. `amax`, `encode_scale` and keys then have only the
            other batch axes.
        sign_key: for `Hadamard(signs="drawn")`, and only for it: the key of the signs, one for all slices of the batch
            axes or one for each; or the `signs` of another QuantizedArray, to rotate alike. Both operands of a GEMM
            need the same one: equal keys are the caller's task, since a product cannot compare them before it runs.
            Another key compiles nothing anew.

    Returns:
        A QuantizedArray whose `dequantize()` approximates x. NaN and infinity never become finite: the block that holds
        one decodes to NaN; with a tensor scale the whole slice does, or, if a finite amax is given, the element or
        block.

    Raises:
        TypeError: x is not a float array of those dtypes, or the key is not usable.
        ValueError: an axis, rotation, rounding, key, sign_key, amax, encode_scale or shape that does not fit.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    Int4 rounds to nearest, without rotation or amax; x is rounded to its scale_dtype first. Row-scaled NVFP4 rounds to
    nearest, without rotation or a given amax.

    Source: numerics.md 1 to 7 and 13 to 15; int4_qat.md 1.4; arXiv 2509.25149, 2601.22813 (MS-EDEN), 2412.19437,
    2209.05433, OCP MX v1.0.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.quantize(jnp.ones((32, 64), jnp.bfloat16), jlp.NVFP4())
    QuantizedArray(NVFP4 1x16, shape=(32, 64), dtype=bfloat16, axis=-1, 1.1 KiB, 3.54x smaller)
    """
    who = "quantize"
    x = quantizable(who, x, fmt)
    axis = last_axis(who, axis, x.ndim)
    rotation = as_hadamard(who, hadamard)
    indices = checked_options(who, (axis,), rounding, offset, axis_name, rows_split, implementation)
    check_plain(who, fmt, rotation, rounding)
    check_length(who, x, fmt, axis)
    batch = tensor_batch(who, x, fmt, (axis,), rotation, rounding, rows_split)
    source = sign_source(who, rotation, sign_key, batch, x.shape[len(batch) : -2])
    if x.ndim == 1 and fmt.scaling != "float16":
        if fmt.tiles:
            needs = f"{type(fmt).__name__}(block=(1, {fmt.length}))"
            raise ValueError(f"{who}: x is a vector; {fmt} has two-dimensional blocks: use {needs}")
        row = quantize(
            x[None],
            fmt,
            axis=-1,
            hadamard=hadamard,
            rounding=rounding,
            key=key,
            amax=amax,
            implementation=implementation,
            encode_scale=encode_scale,
            offset=offset,
            axis_name=axis_name,
            sign_key=sign_key,
        )
        scale = row.scale if fmt.scaling == "tensor" else row.scale[0]
        own: Any = row.amax
        own = own[0] if fmt.row_scaled else own
        return dataclasses.replace(row, data=row.data[0], scale=scale, amax=own, matrix_shape=x.shape)
    words = random_words(who, rounding, key, batch)
    tensor = given_tensor(who, fmt, amax, encode_scale, batch)
    if fmt.scaling == "float16":
        return quantize_int4(x, fmt, axis, implementation)
    if fmt.row_scaled:
        _check_whole_lines(who, fmt, axis_name)
        return _quantize_lines(x, fmt, axis, implementation)
    if axis_name is not None and tensor is None and (fmt.has_tensor_scale or fmt.scaling == "rows"):
        mesh_axes(who, axis_name)
    call = _Call(
        fmt, rotation, encode_scale is not None, axis_name, rows_split, implementation, eden=rounding == "eden"
    )
    return _quantize(x, tensor, words, indices, source, axis, call)


def quantize_both(
    x: Float[Array, "*B M K"],
    fmt: Format,
    *,
    hadamard_columnwise: bool | Hadamard = False,
    rounding: Rounding | tuple[Rounding, Rounding] = "nearest",
    key: jax.Array | None = None,
    implementation: Implementation = None,
    amax: tuple[Float[Array, "*B"], Float[Array, "*B"]] | None = None,
    encode_scale: Float[Array, "*B"] | None = None,
    offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
    axis_name: Hashable | None = None,
    rows_split: bool = False,
    sign_key: jax.Array | None = None,
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantises an array rowwise and columnwise, in one pass over it where both round alike.

    The bytes are those of `quantize(x, fmt, axis=-1)` and `quantize(x, fmt, axis=-2, hadamard=hadamard_columnwise)`
    with the same rounding and key. With 16x16 blocks and nearest rounding the columnwise codes are the rowwise ones
    transposed, and so they are for MXFP8, MXFP4 and Float8Block in square tiles.

    Arguments:
        x: [..., M, K], bfloat16, float16 or float32.
        fmt, key, implementation, axis_name, rows_split, sign_key: see `quantize`.
        rounding: see `quantize`; or a pair, of the rowwise and of the columnwise result. Only the latter can be "eden",
            since only it is rotated.
        offset: see `quantize`; in multiples of 16 both ways.
        hadamard_columnwise: rotate along axis -2 for the columnwise result; unless by fixed signs and size 16, in a
            pass of its own.
        amax: the amax of x and that of the rotated x, where they are known; see `quantize`.
        encode_scale: for both results; see `quantize`.

    Returns:
        The rowwise and the columnwise QuantizedArray.

    Raises:
        TypeError, ValueError, NotImplementedError: see `quantize`.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> row, column = jlp.quantize_both(jnp.ones((32, 64), jnp.bfloat16), jlp.NVFP4(), hadamard_columnwise=True)
    >>> row.data.shape, column.data.shape
    ((32, 32), (64, 16))
    """
    who = "quantize_both"
    x = quantizable(who, x, fmt)
    if x.ndim < 2:
        raise ValueError(f"{who}: x has shape {x.shape}; needs two dimensions or more")
    rotation = as_hadamard(who, hadamard_columnwise)
    roundings = checked_roundings(who, fmt, rotation, rounding)
    row_rounding, column_rounding = roundings
    indices = checked_options(who, (-1, -2), row_rounding, offset, axis_name, rows_split, implementation)
    if amax is not None and not (isinstance(amax, tuple) and len(amax) == 2):
        raise TypeError(f"{who}: amax={shown(amax)}; needs a pair: that of x and that of the rotated x")
    batch = tensor_batch(who, x, fmt, (-1, -2), rotation, max(roundings, key=draws_bits), rows_split)
    sign_source(who, rotation, sign_key, batch, x.shape[len(batch) : -2])
    separately = row_rounding != column_rounding or (rotation is not None and not rotates_in_pass(fmt, rotation))
    if fmt.nearest_only or separately:
        options: dict[str, Any] = {
            "encode_scale": encode_scale,
            "offset": offset,
            "axis_name": axis_name,
            "rows_split": rows_split,
        }
        amaxes = amax or (None, None)
        keys = [key if draws_bits(r) or row_rounding == column_rounding else None for r in roundings]
        row = quantize(
            x,
            fmt,
            axis=-1,
            hadamard=False,
            rounding=row_rounding,
            key=keys[0],
            amax=amaxes[0],
            implementation=implementation,
            **options,
        )
        options["sign_key"], rotated = sign_key, rotation or False
        return row, quantize(
            x,
            fmt,
            axis=-2,
            hadamard=rotated,
            rounding=column_rounding,
            key=keys[1],
            amax=amaxes[1],
            implementation=implementation,
            **options,
        )
    if fmt.scaling == "rows":
        _check_whole_lines(who, fmt, axis_name)
    tensors = [given_tensor(who, fmt, a, encode_scale, batch) for a in amax or (None, None)]
    words = random_words(who, row_rounding, key, batch)
    if axis_name is not None and tensors[0] is None and fmt.has_tensor_scale:
        mesh_axes(who, axis_name)
    call = _Call(fmt, rotation, encode_scale is not None, axis_name, rows_split, implementation)
    return _quantize_both(x, tensors, words, indices, call)


def _check_whole_lines(who: str, fmt: Format, axis_name: Any) -> None:
    """Raises ValueError for mesh axes that may split lines which are scaled by their own amaxes."""
    if axis_name is None:
        return
    remedy = "gather x, or leave it out where each device has whole lines"
    if not fmt.row_scaled:
        remedy = "call quantize for each way, with axis_name= for the one whose lines are split"
    raise ValueError(
        f"{who}: axis_name={shown(axis_name)} was given, but {fmt} scales each line by its own amax, and a shard along "
        f"the lines does not know the others'; {remedy}"
    )


class _Call(NamedTuple):
    """The static arguments of a call.

    Attributes:
        format, axis_name, rows_split, implementation: see `quantize`.
        rotation: `hadamard=`, or None.
        encode_scale_given: the number per tensor is the factor to multiply by, not an amax.
        eden: of the roundings with a key, that of scales.
    """

    format: Any
    rotation: Hadamard | None
    encode_scale_given: bool
    axis_name: Any
    rows_split: bool
    implementation: Implementation
    eden: bool = False

    def amaxes(self, x: jax.Array, plain: bool, rotation: Hadamard | None) -> list[jax.Array]:
        """Amaxes of x and of the rotated x, as wanted; over all shards along `axis_name`."""
        found = tensor_amax(x, plain, rotation, self.implementation, self.rows_split)
        return found if self.axis_name is None else [largest_over(amax, self.axis_name) for amax in found]

    def spec(
        self, x: jax.Array, directions: tuple[bool, bool], hadamard: Hadamard | None, stochastic: bool, offset: Any
    ) -> QuantizeSpec:
        """The variant of the op that quantises x. `hadamard`: the rotation that the op applies, or None."""
        options = {
            "encode_scale_given": self.encode_scale_given,
            "rows_split": self.rows_split,
            "eden": self.eden,
            "offset": offset is not None,
        }
        return spec_of(x, self.format, directions, hadamard, stochastic, **options)


# Jitted, so that an eager call is one dispatch.


@functools.partial(jax.jit, static_argnames=("axis", "call"))
def _quantize(
    x: jax.Array, tensor: jax.Array | None, words: jax.Array | None, offset: Any, source: Any, axis: int, call: _Call
) -> QuantizedArray:
    fmt, rotation = call.format, call.rotation
    x, shape, columnwise = jax.lax.stop_gradient(x), x.shape, axis == -2
    fused = rotation
    signs = None if source is None else signs_of(source, shape[:-2])
    if rotation and not (columnwise and rotates_in_pass(fmt, rotation)):
        x, fused = _rotate_padded(x, axis, rotation, signs, call.implementation), None
        if tensor is not None and fmt.scaling == "tensor":  # only these codes keep the sign of a NaN (numerics.md 1)
            x = jnp.where(jnp.isnan(x), jnp.nan, x)
    if tensor is None and fmt.has_tensor_scale:
        (tensor,) = call.amaxes(x, fused is None, fused)
    spec = call.spec(x, (not columnwise, columnwise), fused, words is not None, offset)
    tensors = [] if tensor is None else [tensor]
    if spec.by_lines and call.axis_name is not None:
        tensors = amaxes_of_lines(spec, dict.fromkeys("cr", names_of(call.axis_name)), x)
        spec = dataclasses.replace(spec, amaxes_given=True)
    found = quantize_op(spec, call.implementation)(x, *tensors, *random_operands(spec, x, words, offset))
    return quantized_array(found, tensor, spec, like=(shape, x.dtype), along=(axis, rotation, signs))


@functools.partial(jax.jit, static_argnames="call")
def _quantize_both(
    x: jax.Array, tensors: Sequence[Any], words: jax.Array | None, offset: Any, call: _Call
) -> tuple[QuantizedArray, QuantizedArray]:
    x = jax.lax.stop_gradient(x)
    if tensors[0] is None:
        tensors = call.amaxes(x, True, call.rotation) if call.format.has_tensor_scale else []
    tensors = [*tensors[:1], *tensors[-1:]]
    spec = call.spec(x, (True, True), call.rotation, words is not None, offset)
    found = quantize_op(spec, call.implementation)(x, *tensors, *random_operands(spec, x, words, offset))
    row, column = quantized_arrays(found, tensors, spec, like=x)
    return row, column


@functools.partial(jax.jit, static_argnames=("fmt", "axis", "implementation"))
def _quantize_lines(x: jax.Array, fmt: Format, axis: int, implementation: Implementation) -> QuantizedArray:
    """x with an amax for each line along the axis."""
    rows = jax.lax.stop_gradient(jnp.swapaxes(x, -1, -2) if axis == -2 else x)
    spec = spec_of(rows, fmt, (True, False), None, False)
    amax, *found = row_scaled_quantize_op(spec, implementation)(rows)
    return quantized_array(found, amax, spec, like=(x.shape, x.dtype), along=(axis, None, None))


def _rotate_padded(
    x: jax.Array, axis: int, hadamard: Hadamard, signs: jax.Array | None, implementation: Implementation
) -> jax.Array:
    """x with whole transforms along an axis, rotated. `signs`: those that were drawn."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, hadamard.padded(x.shape[axis]) - x.shape[axis])
    x = jnp.pad(x, padding)
    return hadamard_transform(
        x, axis=axis, size=hadamard.size, signs=hadamard.signs, implementation=implementation, sign_key=signs
    )
