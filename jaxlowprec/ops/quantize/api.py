"""Quantisation of arrays: rowwise, columnwise, or both ways in one pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlowprec.formats import BLOCK, NVFP4, Hadamard, as_hadamard
from jaxlowprec.ops.amax.api import amax as tensor_amax
from jaxlowprec.ops.checks import float_array, last_axis
from jaxlowprec.ops.hadamard.api import hadamard_transform
from jaxlowprec.ops.implementation import Implementation
from jaxlowprec.ops.quantize.op import QuantizeSpec, quantize_op
from jaxlowprec.quantized_array import QuantizedArray

Rounding = Literal["nearest", "stochastic"]


def quantize(
    x: Float[Array, "*B M K"],
    fmt: NVFP4,
    axis: int = -1,
    hadamard: bool | Hadamard = False,
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
    amax: Float[Array, "*B"] | None = None,
    implementation: Implementation = None,
    *,
    offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
) -> QuantizedArray:
    """Quantises an array along one axis.

    Leading axes are batch axes, each slice with its own amax. Lengths need not be multiples of the block: the last
    block is padded with zeros. Not differentiable: it is a step function, and its derivative is taken to be zero.

    Arguments:
        x: [..., M, K] (or a vector [K]), bfloat16, float16 or float32.
        fmt: what to quantise to.
        axis: the quantised (contraction) axis: -1 is rowwise; -2 columnwise, stored K-major: the bytes are those of
            `quantize(jnp.swapaxes(x, -1, -2), fmt)`.
        hadamard: rotate along the quantised axis first: True for the default transform, or a `Hadamard`. For both
            operands of one GEMM, where it cancels.
        rounding: of the codes: "nearest" (ties to even) or "stochastic". Scales always round to nearest.
        key: for stochastic rounding: a JAX key of two 32-bit words (threefry2x32), or uint32 [..., 2]; shaped like the
            batch axes, or one for all slices. The bits depend on the key and each element's place, on nothing else.
        amax: float32, shaped like the batch axes: the largest magnitude to scale by (after the rotation), where it is
            known or must cover more than x. Larger elements saturate. None: x's own.
        implementation: None for the best there is, "ffi" for the native kernel, "reference" for pure JAX.
        offset: row and column of x's first element in the whole array that stochastic rounding should see, for slices
            of it; the column in multiples of 16 (of rows for axis -2).

    Returns:
        A QuantizedArray whose `dequantize()` approximates x. If x holds NaN or infinity all of its slice decodes to
        NaN.

    Raises:
        TypeError: x is no float array of those dtypes, or a key that cannot serve.
        ValueError: an axis, rounding, key, amax or shape that does not fit.
        NotImplementedError: `implementation="ffi"` where there is no kernel.

    Source: numerics.md 1 to 4; arXiv 2509.25149.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> jlp.quantize(jnp.ones((32, 64), jnp.bfloat16), jlp.NVFP4())
    QuantizedArray(NVFP4 1x16, shape=(32, 64), dtype=bfloat16, axis=-1, 1.1 KiB, 3.54x smaller)
    """
    who = "quantize"
    x = _matrix(who, x, fmt)
    axis = last_axis(who, axis, x.ndim)
    rotation = as_hadamard(who, hadamard)
    if x.ndim == 1:
        if fmt.tiles:
            raise ValueError(f"{who}: x is a vector; {fmt} has two-dimensional blocks: use NVFP4((1, 16))")
        row = quantize(x[None], fmt, -1, hadamard, rounding, key, amax, implementation, offset=offset)
        return dataclasses.replace(row, data=row.data[0], scale=row.scale[0], matrix=x.shape)
    words = random_words(who, rounding, key, x.shape[:-2])
    amax = None if amax is None else _given_amax(who, amax, x.shape[:-2])
    return _quantize(x, amax, words, _indices(who, offset, (axis,)), fmt, axis, rotation, implementation)


def quantize_both(
    x: Float[Array, "*B M K"],
    fmt: NVFP4,
    hadamard_columnwise: bool | Hadamard = False,
    rounding: Rounding = "nearest",
    key: jax.Array | None = None,
    implementation: Implementation = None,
    *,
    amax: tuple[Float[Array, "*B"], Float[Array, "*B"]] | None = None,
    offset: tuple[int | jax.Array, int | jax.Array] = (0, 0),
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantises an array rowwise and columnwise, in one pass over it.

    The bytes are those of `quantize(x, fmt, axis=-1)` and `quantize(x, fmt, axis=-2, hadamard=hadamard_columnwise)`
    with the same rounding and key. With 16x16 blocks and nearest rounding the columnwise codes are the rowwise ones
    transposed.

    Arguments:
        x: [..., M, K], bfloat16, float16 or float32.
        fmt, rounding, key, implementation, offset: see `quantize`; `offset` in multiples of 16 both ways.
        hadamard_columnwise: rotate along axis -2 for the columnwise result.
        amax: those of x and of the rotated x, where they are known; see `quantize`.

    Returns:
        The rowwise and the columnwise QuantizedArray.

    Raises:
        As `quantize`.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> row, column = jlp.quantize_both(jnp.ones((32, 64), jnp.bfloat16), jlp.NVFP4(), hadamard_columnwise=True)
    >>> row.data.shape, column.data.shape
    ((32, 32), (64, 16))
    """
    who = "quantize_both"
    x = _matrix(who, x, fmt)
    if x.ndim < 2:
        raise ValueError(f"{who}: x has shape {x.shape}; needs two dimensions or more")
    rotation = as_hadamard(who, hadamard_columnwise)
    if amax is not None and not (isinstance(amax, tuple) and len(amax) == 2):
        raise TypeError(f"{who}: amax={amax!r}; needs a pair: that of x and that of the rotated x")
    amaxes = (None, None) if amax is None else tuple(_given_amax(who, a, x.shape[:-2]) for a in amax)
    if rotation and (fmt.tiles or rotation.size != BLOCK):  # no single pass: rotated and unrotated blocks differ
        row = quantize(x, fmt, -1, False, rounding, key, amaxes[0], implementation, offset=offset)
        return row, quantize(x, fmt, -2, rotation, rounding, key, amaxes[1], implementation, offset=offset)
    words = random_words(who, rounding, key, x.shape[:-2])
    indices = _indices(who, offset, (-1, -2))
    return _quantize_both(x, None if amax is None else amaxes, words, indices, fmt, rotation, implementation)


# Jitted, so that an eager call is one dispatch.


@functools.partial(jax.jit, static_argnames=("fmt", "axis", "rotation", "implementation"))
def _quantize(x, amax, words, offset, fmt, axis, rotation, implementation) -> QuantizedArray:
    x, matrix, columnwise = jax.lax.stop_gradient(x), x.shape[-2:], axis == -2
    fused = rotation
    if rotation and not (columnwise and rotation.size == BLOCK and not fmt.tiles):
        x, fused = _rotate_padded(x, axis, rotation, implementation), None
    if amax is None:
        (amax,) = tensor_amax(x, fused is None, fused, implementation)
    spec = _spec(x, fmt, not columnwise, columnwise, fused, words is not None)
    ((data, scale),) = _run(spec, x, [amax], words, offset, implementation)
    return QuantizedArray(data, scale, amax, None, fmt, matrix, x.dtype, axis, rotation)


@functools.partial(jax.jit, static_argnames=("fmt", "rotation", "implementation"))
def _quantize_both(x, amaxes, words, offset, fmt, rotation, implementation) -> tuple[QuantizedArray, QuantizedArray]:
    x = jax.lax.stop_gradient(x)
    if amaxes is None:
        amaxes = tensor_amax(x, True, rotation, implementation)
    amaxes = [amaxes[0], amaxes[-1]]
    spec = _spec(x, fmt, True, True, rotation, words is not None)
    row, column = _run(spec, x, amaxes, words, offset, implementation)
    common = (fmt, x.shape[-2:], x.dtype)
    return (
        QuantizedArray(*row, amaxes[0], None, *common, -1, None),
        QuantizedArray(*column, amaxes[1], None, *common, -2, rotation),
    )


def _matrix(who: str, x: Any, fmt: Any) -> jax.Array:
    if not isinstance(fmt, NVFP4):
        raise TypeError(f"{who}: fmt={fmt!r}; needs a format such as jaxlowprec.NVFP4()")
    x = float_array(who, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{who}: x is a scalar; needs one dimension or more")
    return x


def _indices(who: str, offset: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Row and column of x's first element; along a quantised axis that of a block."""
    for axis, o in zip((-2, -1), offset, strict=True):
        unit = BLOCK if axis in axes else 1
        if isinstance(o, int) and (o < 0 or o % unit):
            raise ValueError(f"{who}: offset={offset}; along axis {axis} it needs a multiple of {unit} from 0 on")
    row, column = (np.uint32(o) if isinstance(o, int) else o.astype(jnp.uint32) for o in offset)
    return row, column


def _rotate_padded(x: jax.Array, axis: int, hadamard: Hadamard, implementation: Implementation) -> jax.Array:
    """x with whole transforms along an axis, rotated."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % hadamard.size)
    return hadamard_transform(jnp.pad(x, padding), axis, hadamard.size, hadamard.signs, implementation=implementation)


def _given_amax(who: str, amax: Any, batch: tuple[int, ...]) -> jax.Array:
    amax = jnp.asarray(amax)
    if amax.dtype != jnp.float32 or amax.shape not in ((), batch):
        raise ValueError(
            f"{who}: amax has dtype {amax.dtype} and shape {amax.shape}; needs float32 and the batch axes {batch}"
        )
    return jax.lax.stop_gradient(jnp.broadcast_to(amax, batch))


def random_words(who: str, rounding: str, key: Any, batch: tuple[int, ...]) -> jax.Array | None:
    """The two uint32 words of `key=` for each slice of the batch axes, or None for nearest rounding."""
    if rounding == "nearest":
        if key is not None:
            raise ValueError(f'{who}: a key was given but rounding is "nearest"; pass rounding="stochastic" or no key')
        return None
    if rounding != "stochastic":
        raise ValueError(f'{who}: rounding={rounding!r}; needs "nearest" or "stochastic"')
    if key is None:
        raise ValueError(f'{who}: rounding="stochastic" needs key=, such as jax.random.key(0)')
    return key_words(who, key, batch)


def key_words(who: str, key: Any, batch: tuple[int, ...]) -> jax.Array:
    """The two uint32 words of a key, or of one key for each slice, as [*batch, 2]."""
    if not hasattr(key, "dtype"):
        raise TypeError(f"{who}: key={key!r}; needs a JAX key such as jax.random.key(0)")
    words = key
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
        if words.shape[-1] != 2:
            raise TypeError(
                f"{who}: key is of the kind {jax.random.key_impl(key)!r} with {words.shape[-1]} words; stochastic "
                'rounding needs the two of jax.random.key(seed, impl="threefry2x32")'
            )
    if words.dtype != jnp.uint32 or words.shape[-1:] != (2,) or words.shape[:-1] not in ((), batch):
        raise TypeError(
            f"{who}: key has dtype {key.dtype} and shape {key.shape}; needs one JAX key, or one for each slice of the "
            f"batch axes {batch}"
        )
    return jnp.broadcast_to(words, (*batch, 2))


def _spec(
    x: jax.Array, fmt: NVFP4, rowwise: bool, columnwise: bool, hadamard: Hadamard | None, stochastic: bool
) -> QuantizeSpec:
    ragged_rows, ragged_columns = (n % BLOCK != 0 for n in x.shape[-2:])
    return QuantizeSpec(rowwise, columnwise, fmt.tiles, hadamard, stochastic, ragged_rows, ragged_columns)


def _run(
    spec: QuantizeSpec,
    x: jax.Array,
    amaxes: list[jax.Array],
    words: jax.Array | None,
    offset: tuple[jax.Array, jax.Array],
    implementation: Implementation,
) -> list[tuple[jax.Array, jax.Array]]:
    """Codes and scales for each direction of the spec."""
    operands = [x, *amaxes]
    if words is not None:
        row, column = offset
        rows, columns = x.shape[-2:]

        def indices(count, first):  # made beside the op, so that they are split as x is
            return jnp.arange(count, dtype=jnp.uint32) + first

        operands.append(words)
        if spec.rowwise:
            operands += [indices(rows, row), indices(-(-columns // BLOCK), column // BLOCK)]
        if spec.columnwise:
            operands += [indices(columns, column), indices(-(-rows // BLOCK), row // BLOCK)]
    out = quantize_op(spec, implementation)(*operands)
    return list(zip(out[0::2], out[1::2], strict=True))
