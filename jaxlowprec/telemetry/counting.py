"""The statistics of a quantised tensor as one vector, from the counts and sums of `ops.statistics`.

All numbers are those of a whole array where it is split over devices: JAX sees to that on a mesh, and within
`jax.shard_map` sums are taken over the given axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.arrays.quantized_array import QuantizedArray, as_matrices, lines_of
from jaxlowprec.ops.dequantize import dequantize
from jaxlowprec.ops.grouped_matmul.api import GroupedQuantizedArray
from jaxlowprec.ops.grouped_matmul.groups import Groups
from jaxlowprec.ops.grouped_matmul.in_slots import in_slots
from jaxlowprec.ops.hadamard import hadamard_transform
from jaxlowprec.ops.statistics import reference
from jaxlowprec.ops.statistics.finish import CHANNELS
from jaxlowprec.ops.statistics.op import moments_op, outliers_op, ragged_of, statistics_op, sums_op
from jaxlowprec.wiring.sharding_rule import replicated

OUTLIER = 6.0  # root mean squares


class Reductions(NamedTuple):
    """Reductions over all matrices of a tensor, and over its shards.

    Attributes:
        axes: the axes of `jax.shard_map` that split it.
    """

    axes: tuple[Hashable, ...] = ()

    def sum(self, x: jax.Array) -> jax.Array:
        """[..., n] -> [n]."""
        x = x.sum(axis=tuple(range(x.ndim - 1)))
        return jax.lax.psum(x, self.axes) if self.axes else x

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest of numbers that are not negative."""
        largest = x.max(initial=0)
        return jax.lax.pmax(largest, self.axes) if self.axes else largest

    def rms(self, each: jax.Array) -> jax.Array:
        """The root mean square of the whole from those of matrices, which have one size."""
        unit = reference.inverse_power(self.largest(each))
        mean = jnp.square(each * unit).mean()
        return jnp.sqrt(jax.lax.pmean(mean, self.axes) if self.axes else mean) / unit

    def size(self, x: jax.Array) -> jax.Array:
        """How many elements the whole has, float32."""
        return self.sum(jnp.full((1,), x.size, jnp.float32))[0]


class Source(NamedTuple):
    """Statistics of an array before it is quantised; all its quantised forms share them.

    Attributes:
        amax, rms: see `Statistics`.
        outliers: see `Statistics`.
        channels: `outlier_channels` and `channel_shares`.
    """

    amax: jax.Array
    rms: jax.Array
    outliers: jax.Array
    channels: jax.Array


def source(x: jax.Array, axes: tuple[Hashable, ...] = (), sizes: jax.Array | None = None) -> Source:
    """The statistics of an array that do not depend on its quantised forms.

    Arguments:
        axes: those of `jax.shard_map` that split it.
        sizes: of the groups of its rows [T, C]; rows in none do not count.
    """
    over, x = Reductions(axes), jnp.atleast_2d(x)
    rows = None if sizes is None else Groups.of(sizes, x.shape[0]).ends[-1]
    if rows is not None:
        x = jnp.where(jnp.arange(x.shape[0])[:, None] < rows, x, 0)
    moments = moments_op()(x)[0]
    size = over.size(x)
    rms = over.rms(moments[..., 1])
    if rows is not None:
        everything, size = size, jnp.maximum(over.sum(jnp.float32(rows * x.shape[1])[None])[0], 1)
        rms = rms * jnp.sqrt(everything / size)
    beyond = outliers_op()(x, jnp.broadcast_to(OUTLIER * rms, x.shape[:-2]))[0]
    outliers = over.sum(beyond.astype(jnp.float32).sum(keepdims=True).reshape(1))[0]
    return Source(over.largest(moments[..., 0]), rms, outliers / size, _channels(beyond, outliers, over))


Quantized = QuantizedArray | GroupedQuantizedArray


def measured(
    sources: Sequence[Source], tensors: Sequence[tuple[jax.Array, Quantized]], axes: tuple[Hashable, ...] = ()
) -> jax.Array:
    """The vectors of `Statistics` of one use each, float32 [n, LENGTH].

    Arguments:
        sources: of the arrays.
        tensors: arrays and what they were quantised to.
        axes: the axes of `jax.shard_map` that split them.
    """
    over = Reductions(axes)
    largest, sums = [], []
    for before, (x, q) in zip(sources, tensors, strict=True):
        padding = None
        if isinstance(q, GroupedQuantizedArray):
            x, q, padding = _in_slots(x, q)
        x, q = _as_matrices(x, q)
        amax = before.amax
        if q.hadamard is not None:
            x, q = _rotated(x, q)
            amax = over.largest(moments_op()(x)[0][..., 0])
        largest.append(amax)
        found = over.sum(_sums(x, q, jnp.broadcast_to(reference.inverse_power(amax), x.shape[:-2])))
        sums.append(found if padding is None else _without(found, over.sum(padding[None])[0]))
    known = [jnp.stack(part) for part in zip(*[(s.rms, s.outliers, s.channels) for s in sources], strict=True)]
    scalings = tuple(q.format.scaling for _, q in tensors)
    return statistics_op(scalings)(jnp.stack(sums), jnp.stack(largest), *known)[0]


def _sums(x: jax.Array, q: QuantizedArray, unit: jax.Array) -> jax.Array:
    """[..., reference.LENGTH]."""
    fmt, columnwise = q.format, q.axis == -2
    if fmt.scaling == "float16":
        return _sums_of_int4(replicated(x), jax.tree.map(replicated, q), replicated(unit))
    op = sums_op(fmt, columnwise, ragged_of(fmt, x.shape, columnwise))
    return op(x, unit, q.data, q.scale, *([] if q.amax is None else [q.amax]))[0]


def _sums_of_int4(x: jax.Array, q: QuantizedArray, unit: jax.Array) -> jax.Array:
    """The sums of an INT4 array by the reference, because its codes have zero points."""
    if q.axis == -2:
        x, q = jnp.swapaxes(x, -1, -2), q.mT
    limits = [dataclasses.replace(q, data=jnp.full_like(q.data, byte)) for byte in (0xFF, 0x00)]
    values = tuple(dequantize(made, dtype=jnp.float32) for made in (q, *limits))
    bins = reference.code_bins(q.data, q.format, x.shape[-1])
    return reference.sums_of_rows(x, unit, values, bins, q.scale, q.format)


def _channels(beyond: jax.Array, outliers: jax.Array, over: Reductions) -> jax.Array:
    """The channels with the most outliers, and their shares."""
    if over.axes:  # which channels the other shards hold is not known here
        return jnp.concatenate([jnp.full(CHANNELS, -1.0), jnp.zeros(CHANNELS)])
    counts = replicated(beyond.sum(axis=tuple(range(beyond.ndim - 1))))
    counts, found, most = jnp.pad(counts, (0, CHANNELS)), [], []
    for _ in range(CHANNELS):  # XLA's top_k sorts them all
        place = jnp.argmax(counts)
        found.append(place)
        most.append(counts[place])
        counts = jnp.where(jnp.arange(counts.size) == place, -1, counts)
    shares = jnp.stack(most)
    channels = jnp.where(shares > 0, jnp.stack(found), -1).astype(jnp.float32)
    return jnp.concatenate([channels, shares / jnp.maximum(outliers, 1)])


def _in_slots(x: jax.Array, q: GroupedQuantizedArray) -> tuple[jax.Array, QuantizedArray, jax.Array]:
    """Rows in groups as matrices, and how many of their elements are zeros that fill the slots."""
    slots = in_slots(jax.tree.map(replicated, q), reference.RUN)
    x = slots.take(replicated(x))
    return x, slots.quantized, jnp.float32((x.shape[0] * slots.block - slots.rows()) * q.columns)


def _without(sums: jax.Array, zeros: jax.Array) -> jax.Array:
    """Sums without so many zeros."""
    elements, zero = reference.SUMS.index("elements"), reference.SUMS.index("zeros")
    sums = sums.at[np.array([elements, zero, reference.CODES_FROM])].add(-zeros)
    return sums.at[elements].max(1)


def _as_matrices(x: jax.Array, q: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """A vector, or each line of a row-scaled array, as a matrix of one row."""
    if len(q.matrix_shape) == 2:
        return (lines_of(x, q.axis), as_matrices(q)) if q.format.row_scaled else (x, q)
    scale = q.scale if q.format.scaling == "tensor" else q.scale[..., None, :]
    zero_point = None if q.zero_point is None else q.zero_point[..., None, :]
    shape = (1, *q.matrix_shape)
    row = dataclasses.replace(q, data=q.data[..., None, :], scale=scale, zero_point=zero_point, matrix_shape=shape)
    return x[..., None, :], row


def _rotated(x: jax.Array, q: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """The elements that were rounded, padded to whole transforms, and their codes."""
    rotation: Any = q.hadamard
    axis, size = q.axis, rotation.size
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, padding) if padding[axis][1] else x
    x = hadamard_transform(x, axis=axis, size=size, signs=rotation.signs, sign_key=q.signs)
    return x, dataclasses.replace(q, hadamard=None, signs=None, matrix_shape=x.shape[-2:])
