"""Int4 quantisation on TPUs: a Pallas kernel by the reference's own rule, on vectors as in `ops.quantize.tpu`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import BLOCK, Int4
from jaxlowprec.ops.exact import corrected_quotient
from jaxlowprec.ops.int4.reference import LARGEST_CODE, least_code, poisoned, scale_and_zero, signed_steps
from jaxlowprec.ops.rounding import flush, from_bits, magnitude_bits, narrowed_by_integers
from jaxlowprec.ops.tiles import (
    LANES,
    SUBLANES,
    UNIT,
    call,
    each_chunk,
    fill,
    has_tiles,
    in_units,
    largest,
    largest_of,
    sixteen_vectors,
    tile_of,
)


def serves(fmt: Int4, x: Any) -> bool:
    """Whether the kernel has this variant: bfloat16 scales of groups that are whole in a chunk."""
    whole = UNIT % fmt.group_size == 0 and fmt.group_size >= BLOCK
    return has_tiles(x) and fmt.rule == "deploy" and fmt.scale_dtype == "bfloat16" and whole


def quantize(fmt: Int4, columnwise: bool, x: jax.Array, interpret: bool = False) -> list[jax.Array]:
    """The results of `quantize_op` of x [..., R, C]. `interpret`: by JAX's own operations, on any platform."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    *batch, lines, length = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if columnwise else x.shape
    x = in_units(x)
    along, across = (1, 2) if columnwise else (2, 1)  # axes of x; groups are along the first
    height, width = tile_of(x)[along - 1], tile_of(x)[across - 1]
    count, n, m = x.shape[0], x.shape[along], x.shape[across]

    def result(shape: tuple[int, ...], dtype: Any, block: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Any, Any]:
        place = pl.BlockSpec(block, lambda *grid: tuple(grid[axis] for axis in axes))
        return jax.ShapeDtypeStruct(shape, dtype), place

    outputs = [result((count, m, n // 2), jnp.uint8, (1, width, height // 2), (0, across, along))]
    for dtype in (jnp.float32,) if fmt.symmetric else (jnp.float32, jnp.int32):
        outputs.append(result((count, n // BLOCK, m), dtype, (1, height // BLOCK, width), (0, along, across)))
    scratch = [
        pltpu.VMEM((width // LANES, height, LANES), jnp.float32),
        pltpu.VMEM((width // LANES, height // 2, LANES), jnp.int32),
    ]
    data, *found = call("int4", functools.partial(_kernel, fmt, columnwise), x, [], outputs, scratch, interpret)
    blocks = -(-length // fmt.group_size)
    of_blocks = [jnp.swapaxes(array[:, :: fmt.group_size // BLOCK, :lines], 1, 2)[..., :blocks] for array in found]
    dtypes = (jnp.dtype(fmt.scale_dtype), jnp.dtype(jnp.uint8))
    results = [data[:, :lines, : blocks * fmt.group_size // 2]]
    results += [array.astype(dtype) for array, dtype in zip(of_blocks, dtypes, strict=False)]
    return [array.reshape(*batch, *array.shape[1:]) for array in results]


def _kernel(fmt: Int4, columnwise: bool, x: Any, data: Any, *refs: Any) -> None:
    """Quantises a tile. `refs`: scales, zero points where the format has them, and scratch."""
    *of_blocks, source, codes = refs
    tile = x[0].astype(jnp.float32)
    fill(source, tile if columnwise else tile.T)
    each_chunk(source, functools.partial(_quantize_chunk, fmt, x.dtype, source, codes, of_blocks))
    for column in range(codes.shape[0]):
        data[0, column * LANES : (column + 1) * LANES, :] = codes[column].T.astype(jnp.uint8)


def _quantize_chunk(fmt: Int4, dtype: Any, source: Any, codes: Any, of_blocks: Any, row: Any, column: Any) -> None:
    from jax.experimental import pallas as pl

    values = [flush(value) for value in sixteen_vectors(source, row, column)]
    if dtype == jnp.float32:
        values = [narrowed_by_integers(value) for value in values]

    def of_group(each: list[jax.Array]) -> jax.Array:
        return largest_of(largest(each), 0, fmt.group_size // BLOCK)

    bits = of_group([magnitude_bits(value).astype(jnp.int32) for value in values])
    low = high = from_bits(bits)
    if not fmt.symmetric:
        low, high = -jnp.maximum(of_group([-value for value in values]), 0), jnp.maximum(of_group(values), 0)
    scale, zero = scale_and_zero(low, high, fmt, _divided, lambda number, _: narrowed_by_integers(number))
    bad, zero, scale = poisoned(bits, zero, scale, fmt)
    places = pl.ds(pl.multiple_of(row * SUBLANES, SUBLANES), SUBLANES), pl.ds(column * LANES, LANES)
    for array, found in zip(of_blocks, (scale, zero), strict=False):
        array[0, *places] = found
    code = [jnp.clip(signed_steps(value, scale, fmt) + zero, least_code(fmt), LARGEST_CODE) for value in values]
    code = [jnp.where(bad, zero, each) for each in code]
    for k, (even, odd) in enumerate(zip(code[::2], code[1::2], strict=True)):
        codes[column, pl.ds(row * (UNIT // 2) + k, SUBLANES, BLOCK // 2), :] = even | odd << 4


def _divided(a: jax.Array, b: int, dtype: jnp.dtype) -> jax.Array:
    """`rounded_quotient` of a magnitude and a constant."""
    near = jax.lax.bitcast_convert_type(narrowed_by_integers(a * jnp.float32(1 / b)), jnp.int32) >> 16
    return corrected_quotient(a, float(b), near, dtype)
