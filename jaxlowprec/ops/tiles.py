"""Tiles of the Pallas kernels for TPUs, and the kernel of rotated amaxes.

Blocks of 16 or 32 elements fit badly into vectors of 8 x 128. So every 16th row of a tile is read with a stride: then
16 consecutive elements of a column are in the same place of 16 vectors, and transforms of size 16 are elementwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.hadamard import butterfly
from jaxlowprec.ops.rounding import magnitude_bits, narrowed_by_integers

SUBLANES, LANES = 8, 128  # of a vector
UNIT = SUBLANES * BLOCK  # rows of a chunk of 16 vectors
TILE = 4 * UNIT  # rows and columns of a tile, or those of the array if it has fewer
SLICES = 4096  # matrices of one call
UNROLLED = 4  # chunks whose instructions are scheduled together


def has_tiles(x: Any) -> bool:
    """Whether kernels take x: they do not round to float16, tiles are counted before the program runs, and the numbers
    of only so many slices fit into scalar memory."""
    known = all(isinstance(n, int) for n in x.shape)
    return x.dtype != jnp.float16 and known and math.prod(x.shape[:-2]) <= SLICES


def in_units(x: jax.Array) -> jax.Array:
    """x [..., R, C] as [B, R, C], padded with zeros to whole chunks."""
    rows, columns = x.shape[-2:]
    x = x.reshape(-1, rows, columns)
    return jnp.pad(x, [(0, 0), (0, -rows % UNIT), (0, -columns % UNIT)])


def tile_of(x: jax.Array) -> tuple[int, int]:
    """The shape of tiles of x [B, R, C]."""
    rows, columns = (min(n, TILE) for n in x.shape[1:])
    return rows, columns


def grid_of(x: jax.Array) -> tuple[int, int, int]:
    """How many tiles x [B, R, C] has along its axes."""
    height, width = tile_of(x)
    return x.shape[0], -(-x.shape[1] // height), -(-x.shape[2] // width)


def call(
    name: str,
    kernel: Callable[..., None],
    x: jax.Array,
    inputs: Sequence[tuple[jax.Array, Any]],
    outputs: Sequence[tuple[Any, Any]],
    scratch: Sequence[Any],
    interpret: bool,
) -> Sequence[jax.Array]:
    """Calls a kernel with each tile of x [B, R, C]; what it reads of a tile beyond the array's end is arbitrary.

    Arguments:
        kernel: takes references to the tile [1, ., .], and to the parts of inputs, outputs and scratch.
        inputs, outputs: further arrays, or their shapes, and their Pallas block specifications.
        interpret: by JAX's own operations, on any platform.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    height, width = tile_of(x)
    varying = jax.typeof(x).manual_axis_type  # over the axes of a shard_map
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=varying) for s, _ in outputs]
    return pl.pallas_call(
        kernel,
        grid=grid_of(x),
        in_specs=[pl.BlockSpec((1, height, width), lambda *at: at), *(spec for _, spec in inputs)],
        out_specs=[spec for _, spec in outputs],
        out_shape=shapes,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        interpret=interpret,
        name=f"jaxlowprec_{name}",
    )(x, *(array for array, _ in inputs))


def fill(source: Any, tile: jax.Array) -> None:
    """Stores a tile [N, M] as [M / 128, N, 128], of which rows can be read with a stride."""
    for column in range(source.shape[0]):
        source[column] = tile[:, column * LANES : (column + 1) * LANES]


def sixteen_vectors(source: Any, row: Any, column: Any) -> list[jax.Array]:
    """The vectors [8, 128] of a chunk: sixteen consecutive rows of the source are in the same place of them."""
    from jax.experimental import pallas as pl

    return [source[column, pl.ds(row * UNIT + k, SUBLANES, BLOCK), :] for k in range(BLOCK)]


def each_chunk(source: Any, chunk: Callable[[Any, Any], None]) -> None:
    """Calls it with the row and the column of each chunk of a source."""
    from jax.experimental import pallas as pl

    columns, rows, _ = source.shape

    def chunks_of(row: Any) -> None:
        pl.loop(0, columns, unroll=min(UNROLLED, columns))(functools.partial(chunk, row))

    pl.loop(0, rows // UNIT)(chunks_of)


def largest(each: list[jax.Array]) -> jax.Array:
    """The largest of vectors, elementwise; a power of two of them."""
    while len(each) > 1:
        each = [jnp.maximum(a, b) for a, b in zip(each[::2], each[1::2], strict=True)]
    return each[0]


def largest_of(numbers: jax.Array, axis: int, count: int) -> jax.Array:
    """In every place of [8, 128] the largest of its group of so many places along an axis."""
    from jax.experimental.pallas import tpu as pltpu

    place, step = jax.lax.broadcasted_iota(jnp.int32, numbers.shape, axis), 1
    while step < count:
        before, after = pltpu.roll(numbers, step, axis), pltpu.roll(numbers, numbers.shape[axis] - step, axis)
        numbers = jnp.maximum(numbers, jnp.where(place & step != 0, before, after))
        step *= 2
    return numbers


def rotated(values: list[jax.Array], rotation: Hadamard, dtype: Any) -> list[jax.Array]:
    """16 vectors after a transform of size 16, rounded to `dtype`, as float32."""
    signed = [-value if negative else value for value, negative in zip(values, rotation.negative, strict=True)]
    found = [value * jnp.float32(0.25) for value in butterfly(signed)]
    return found if dtype == jnp.float32 else [narrowed_by_integers(value) for value in found]


def largest_bits(x: jax.Array, rotations: list[Hadamard | None], interpret: bool = False) -> list[jax.Array]:
    """x [..., R, C] -> the bits, int32 [...], of its largest magnitude after each rotation along axis -2; None: as it
    is. `interpret`: by JAX's own operations, on any platform."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    dtype, batch, x = x.dtype, x.shape[:-2], in_units(x)
    height, width = tile_of(x)
    shape = jax.ShapeDtypeStruct((*grid_of(x), SUBLANES, LANES), jnp.int32)
    spec = pl.BlockSpec((1, 1, 1, SUBLANES, LANES), lambda *at: (*at, 0, 0))
    scratch = [pltpu.VMEM((width // LANES, height, LANES), jnp.float32)]
    kernel = functools.partial(_largest_of_tile, rotations, dtype, x.shape[1:])
    found = call("amax", kernel, x, [], [(shape, spec)] * len(rotations), scratch, interpret)
    return [bits.max(axis=(1, 2, 3, 4)).reshape(batch) for bits in found]


def _largest_of_tile(rotations: Any, dtype: Any, shape: tuple[int, ...], x_ref: Any, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    *outputs, source = refs
    fill(source, x_ref[0].astype(jnp.float32))
    columns, rows, _ = source.shape
    first_row, first_column = pl.program_id(1) * rows, pl.program_id(2) * columns * LANES
    for output in outputs:
        output[...] = jnp.zeros_like(output)

    def chunk(row: Any, column: Any) -> None:
        there = (first_row + row * UNIT < shape[0]) & (first_column + column * LANES < shape[1])  # not beyond x's end
        values = sixteen_vectors(source, row, column)
        for rotation, output in zip(rotations, outputs, strict=True):
            each = values if rotation is None else rotated(values, rotation, dtype)
            bits = largest([magnitude_bits(value).astype(jnp.int32) for value in each])
            output[0, 0, 0] = jnp.maximum(output[0, 0, 0], jnp.where(there, bits, 0))

    each_chunk(source, chunk)
