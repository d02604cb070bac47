"""Quantisation on TPUs: a Pallas kernel that reads a tile once and writes the codes of both directions.

XLA makes ten passes and more of the reference. Here a tile is read in vectors in which sixteen elements of a block are
in the same place (`ops.tiles`). What the rules do to an element or a block is elementwise then, and is the reference's
own code. The tile is transposed for blocks along the other axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.formats import BLOCK, Format
from jaxlowprec.ops.quantize.random_bits import ten_rounds
from jaxlowprec.ops.quantize.reference import TensorFactors, block_scales, signed_codes, stored, tensor_factors
from jaxlowprec.ops.rounding import magnitude_bits
from jaxlowprec.ops.tiles import (
    LANES,
    SUBLANES,
    call,
    each_chunk,
    fill,
    has_tiles,
    in_units,
    largest,
    largest_of,
    rotated,
    sixteen_vectors,
    tile_of,
)


def serves(spec: Any, x: Any) -> bool:
    """Whether the kernel has this variant: all but scales of lines, chosen scales and the random scales of EDEN."""
    return has_tiles(x) and not spec.eden and not spec.format.chooses_scales and not spec.by_lines


def quantize(spec: Any, x: jax.Array, *operands: jax.Array, interpret: bool = False) -> list[jax.Array]:
    """Codes and scales per direction of x [..., R, C], from the operands of `quantize_op`.

    `interpret`: by JAX's own operations, on any platform.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    fmt, batch, shape, dtype = spec.format, x.shape[:-2], x.shape[-2:], x.dtype
    tensors, random = operands[: spec.tensors], operands[spec.tensors :]
    x = in_units(x)
    in_scalar_memory = pl.BlockSpec(memory_space=pltpu.SMEM)
    inputs: list[tuple[jax.Array, Any]] = []
    factors = [tensor_factors(tensor.reshape(-1), fmt, spec.encode_scale_given) for tensor in tensors]
    if factors:
        inputs.append((jnp.stack([number for pair in factors for number in pair], axis=-1).ravel(), in_scalar_memory))
    if random:
        inputs.append((_as_int32(jnp.broadcast_to(random[0], (*batch, 2)).ravel()), in_scalar_memory))

    outputs: list[tuple[Any, Any]] = []
    scratch = []
    per_byte = 2 if fmt.packed else 1
    for i, columnwise in enumerate(_directions(spec)):
        along, across = (1, 2) if columnwise else (2, 1)  # axes of x; blocks are along the first
        n, m = x.shape[along], x.shape[across]
        height, width = tile_of(x)[along - 1], tile_of(x)[across - 1]

        def place(*axes: int | None) -> Any:
            """The index of a block along these axes of the grid; None: there is one block."""
            return lambda *grid: tuple(0 if axis is None else grid[axis] for axis in axes)

        outputs.append(
            (
                jax.ShapeDtypeStruct((x.shape[0], m, n // per_byte), fmt.data_dtype),
                pl.BlockSpec((1, width, height // per_byte), place(0, across, along)),
            )
        )
        if fmt.scaling != "tensor":
            kind = jnp.float32 if fmt.scaling == "float32" else jnp.int32
            outputs.append(
                (
                    jax.ShapeDtypeStruct((x.shape[0], n // BLOCK, m), kind),
                    pl.BlockSpec((1, height // BLOCK, width), place(0, along, across)),
                )
            )
        if random:
            lines, sixteens = _padded(random[1 + 2 * i], m), _padded(random[2 + 2 * i], n // BLOCK)
            inputs.append((lines[None], pl.BlockSpec((1, width), place(None, across))))
            sixteens = jnp.broadcast_to(sixteens[:, None], (sixteens.size, LANES))
            inputs.append((sixteens, pl.BlockSpec((height // BLOCK, LANES), place(along, None))))
        scratch.append(pltpu.VMEM((width // LANES, height, LANES), jnp.float32))
        scratch.append(pltpu.VMEM((width // LANES, height // per_byte, LANES), jnp.int32))
    found = call("quantize", functools.partial(_kernel, spec, dtype), x, inputs, outputs, scratch, interpret)
    return _results(spec, found, (*batch, *shape), [pair.decode for pair in factors])


def _directions(spec: Any) -> list[bool]:
    """For each direction that the spec wants, whether it is columnwise."""
    return [False] * spec.rowwise + [True] * spec.columnwise


def _as_int32(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _padded(indices: jax.Array, size: int) -> jax.Array:
    indices = _as_int32(indices.reshape(-1))
    return jnp.pad(indices, (0, size - indices.size))


def _results(
    spec: Any, found: Sequence[jax.Array], shape: tuple[int, ...], decode: Sequence[jax.Array]
) -> list[jax.Array]:
    """The kernel's results as those of the op."""
    fmt, left, (*batch, rows, columns), out = spec.format, list(found), shape, []
    for i, columnwise in enumerate(_directions(spec)):
        lines, length = (columns, rows) if columnwise else (rows, columns)
        blocks = -(-length // max(fmt.length, 1))
        data = left.pop(0)[:, :lines, : blocks * fmt.length // 2 if fmt.packed else length]  # nibbles of whole blocks
        out.append(data.reshape(*batch, *data.shape[1:]))
        if fmt.scaling == "tensor":
            out.append(decode[i].reshape(batch))
            continue
        scale = left.pop(0)[:, :: fmt.length // BLOCK, : lines : fmt.length if fmt.tiles else 1]
        scale = stored(jnp.swapaxes(scale, 1, 2)[..., :blocks], fmt)
        out.append(scale.reshape(*batch, *scale.shape[1:]))
    return out


class _Direction(NamedTuple):
    """One direction of a tile, [N, M] with blocks along N.

    Attributes:
        source: scratch, float32 [M/128, N, 128]; codes: scratch, int32 [M/128, bytes of N, 128].
        data, scales: results of the tile, [1, M, bytes of N] and [1, N/16, M].
        factors: of the tensor.
        random: words of the key, indices of lines [1, M] and of sixteens [N/16, 128], and the stream.
        rotation: along N.
    """

    source: Any
    codes: Any
    data: Any
    scales: Any
    factors: TensorFactors | None
    random: Any
    rotation: Any


def _kernel(spec: Any, dtype: Any, x: Any, *refs: Any) -> None:
    """Quantises a tile. `refs`: inputs, outputs and scratch, as `quantize` lists them."""
    from jax.experimental import pallas as pl

    fmt, left, columnwise = spec.format, list(refs), _directions(spec)
    slice_index = pl.program_id(0)
    numbers = left.pop(0) if spec.tensors else None
    words = left.pop(0) if spec.stochastic else None
    indices = [(left.pop(0), left.pop(0)) if spec.stochastic else () for _ in columnwise]
    results = [(left.pop(0), None if fmt.scaling == "tensor" else left.pop(0)) for _ in columnwise]
    for i, down in enumerate(columnwise):
        factors = random = None
        if numbers is not None:
            first = 2 * (slice_index * len(columnwise) + i)
            factors = TensorFactors(numbers[first], numbers[first + 1])
        if words is not None:
            random = (words[2 * slice_index], words[2 * slice_index + 1]), *indices[i], int(down)
        rotation = spec.hadamard if down else None
        direction = _Direction(left.pop(0), left.pop(0), *results[i], factors, random, rotation)
        if fmt.scaling == "tensor" and not spec.stochastic:
            _quantize_elements(fmt, x, direction, down)
            continue
        tile = x[0].astype(jnp.float32)
        fill(direction.source, tile if down else tile.T)
        each_chunk(direction.source, functools.partial(_quantize_chunk, fmt, dtype, direction))
        for column in range(direction.codes.shape[0]):
            direction.data[0, column * LANES : (column + 1) * LANES, :] = _as_data(direction.codes[column].T, fmt)


def _quantize_elements(fmt: Format, x: Any, direction: _Direction, down: bool) -> None:
    """Quantises a tile without blocks, in squares that fit into registers."""
    assert direction.factors is not None
    _, rows, columns = x.shape
    for row, column in itertools.product(range(0, rows, LANES), range(0, columns, LANES)):
        here, there = slice(row, row + LANES), slice(column, column + LANES)
        code = signed_codes(x[0, here, there].astype(jnp.float32), direction.factors.encode, fmt, None)
        if down:
            direction.data[0, there, here] = _as_data(code.T, fmt)
        else:
            direction.data[0, here, there] = _as_data(code, fmt)


def _as_data(code: jax.Array, fmt: Format) -> jax.Array:
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint8), fmt.data_dtype)


def _quantize_chunk(fmt: Format, dtype: Any, direction: _Direction, row: Any, column: Any) -> None:
    from jax.experimental import pallas as pl

    lanes = pl.ds(pl.multiple_of(column * LANES, LANES), LANES)
    blocks = pl.ds(pl.multiple_of(row * SUBLANES, SUBLANES), SUBLANES)
    values = sixteen_vectors(direction.source, row, column)
    if direction.rotation is not None:
        values = rotated(values, direction.rotation, dtype)
    if fmt.scaling == "tensor":
        assert direction.factors is not None
        encode = direction.factors.encode
    else:
        bits = largest([magnitude_bits(value).astype(jnp.int32) for value in values])
        scale, encode = block_scales(_of_whole_blocks(bits, fmt), fmt, direction.factors)
        direction.scales[0, blocks, lanes] = scale
    random: Sequence[Any] = _random_bytes(direction.random, blocks, lanes) if direction.random else [None] * BLOCK
    code = [signed_codes(value, encode, fmt, byte) for value, byte in zip(values, random, strict=True)]
    if fmt.packed:
        code = [low | (high << 4) for low, high in zip(code[::2], code[1::2], strict=True)]
    for k, value in enumerate(code):
        direction.codes[column, pl.ds(row * SUBLANES * len(code) + k, SUBLANES, len(code)), :] = value


def _of_whole_blocks(bits: jax.Array, fmt: Format) -> jax.Array:
    """Amaxes [8, 128] of sixteens as those of whole blocks, in the place of each of their sixteens and lines."""
    return largest_of(largest_of(bits, 0, fmt.length // BLOCK), 1, fmt.length if fmt.tiles else 1)


def _random_bytes(random: Any, blocks: Any, lanes: Any) -> list[jax.Array]:
    """The random bytes of a chunk, int32 [8, 128] for each of its vectors."""
    key, lines, sixteens, stream = random
    line = jnp.broadcast_to(lines[0:1, lanes], (SUBLANES, LANES)).astype(jnp.uint32)
    zero = jnp.zeros_like(line)
    counter = sixteens[blocks, :].astype(jnp.uint32), line, zero + np.uint32(stream), zero
    words = ten_rounds(counter, tuple(word.astype(jnp.uint32) for word in key), unroll=10)
    return [(word >> (8 * i)).astype(jnp.int32) & 255 for word in words for i in range(4)]
