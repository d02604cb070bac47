"""What quantisation does to a tensor, as numbers that are computed on the device.

    q = jlp.quantize(x, jlp.NVFP4(), hadamard=jlp.Hadamard())
    print(jlp.telemetry.statistics(x, q))

`statistics` works on whatever was quantised, and so answers "what if" as well: quantise the same tensor to another
format, along the other axis, or rotated, and compare.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.dequantize.api import dequantize
from jaxlowprec.ops.dequantize.reference import scale_values
from jaxlowprec.ops.hadamard.reference import rotate_float32
from jaxlowprec.ops.quantize.reference import blocks_of
from jaxlowprec.ops.rounding import from_bits
from jaxlowprec.wiring.out_sharding import sharding_of

__all__ = ["Statistics", "statistics"]

OUTLIER = 6.0  # root mean squares
CHANNELS = 4
_FLOORS = {"two_level": 1, "e8m0": 0}  # the code of the smallest positive scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """What quantising a tensor did to it: float32 scalars, but for the channels.

    Elements are those that were rounded: after the rotation, if there was one, with its padding to whole transforms.
    Fractions are of all elements unless they say otherwise. Sums, and so the SQNR, the relative error and the bias,
    leave out elements that are not finite or decode to no finite number.

    Attributes:
        zeros: fraction of elements that are zero.
        underflow: fraction that is not zero and becomes zero.
        saturation: fraction beyond the largest number of their block, and so cut off.
        nonfinite: fraction that is infinite or NaN.
        poisoned: fraction that is finite and decodes to no finite number, because of another element.
        sqnr: energy of the elements over that of their errors, in decibels; infinite without errors.
        relative_error: the root of the inverse: norm of the errors over norm of the elements.
        bias: the sum of the errors over the sum of the magnitudes: 0 if rounding is unbiased.
        amax: the largest finite magnitude.
        smallest_scale, largest_scale: of the blocks with elements other than zero, as they are stored.
        floor: fraction of those blocks at the smallest positive scale; 0 for scales in float32.
        block_range: mean over those blocks of their largest magnitude over their median one, where that is not zero.
        outliers: fraction of elements beyond six times the root mean square.
        outlier_channels: int32 [4]: the places along the tensor's last axis with the most outliers, most first; -1
            where there are fewer.
    """

    zeros: jax.Array
    underflow: jax.Array
    saturation: jax.Array
    nonfinite: jax.Array
    poisoned: jax.Array
    sqnr: jax.Array
    relative_error: jax.Array
    bias: jax.Array
    amax: jax.Array
    smallest_scale: jax.Array
    largest_scale: jax.Array
    floor: jax.Array
    block_range: jax.Array
    outliers: jax.Array
    outlier_channels: jax.Array

    def scalars(self) -> dict[str, float]:
        """The numbers by name, for a logger; without the channels."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "outlier_channels"]
        return {name: float(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        lines = [f"{name:16} {value:.4g}" for name, value in self.scalars().items()]
        return "\n".join(lines)


@jax.jit
def statistics(x: Float[Array, "..."], q: QuantizedArray) -> Statistics:
    """What quantising x to q did to x.

    Arguments:
        x: the array, bfloat16, float16 or float32.
        q: what it was quantised to: any format, axis, rotation and rounding. Subnormal numbers count as zeros, as
            quantising takes them.

    Returns:
        `Statistics`, computed where x is; on a mesh those of the whole array.

    Raises:
        TypeError: x is no float array, or q no QuantizedArray.
        ValueError: they have different shapes.

    >>> import jax, jaxlowprec as jlp
    >>> x = jax.random.normal(jax.random.key(0), (64, 256))
    >>> found = jlp.telemetry.statistics(x, jlp.quantize(x, jlp.NVFP4())).scalars()
    >>> round(found["sqnr"], 1), round(found["underflow"], 2), found["nonfinite"]
    (20.5, 0.07, 0.0)
    """
    who = "telemetry.statistics"
    check_quantized(who, "q", q)
    x = float_array(who, "x", x)
    if x.shape != q.shape:
        raise ValueError(f"{who}: x has shape {x.shape}, q {q.shape}; needs the array that q was quantised from")
    rows, q = _rows(_without_subnormals(x.astype(jnp.float32)), q)
    decoded, highest, lowest = (dequantize(made, jnp.float32) for made in (q, _filled(q, 0), _filled(q, 1)))
    known = jnp.isfinite(rows) & jnp.isfinite(decoded)
    magnitude = jnp.where(known, jnp.abs(rows), 0)
    amax = magnitude.max(initial=0)
    unit = _inverse_power(amax)
    kept, error = (jnp.where(known, v, 0) for v in (rows * unit, decoded * unit - rows * unit))
    energy, errors = _sum(kept * kept), _sum(error * error)
    beyond = known & ((rows > highest) | (rows < lowest))
    return Statistics(
        zeros=_fraction(rows == 0),
        underflow=_fraction((rows != 0) & (decoded == 0)),
        saturation=_fraction(beyond),
        nonfinite=_fraction(~jnp.isfinite(rows)),
        poisoned=_fraction(jnp.isfinite(rows) & ~jnp.isfinite(decoded)),
        sqnr=jnp.where(errors > 0, 10 * jnp.log10(energy / errors), jnp.inf),
        relative_error=jnp.where(energy > 0, jnp.sqrt(errors / energy), 0),
        bias=jnp.where(amax > 0, _sum(error) / _sum(magnitude * unit), 0),
        amax=amax,
        **_of_blocks(magnitude * unit, q),
        **_outliers(x),
    )


def _of_blocks(magnitude: jax.Array, q: QuantizedArray) -> dict[str, jax.Array]:
    """The statistics of blocks, of the rows' magnitudes."""
    fmt, rows = q.format, magnitude.shape[-2]
    if fmt.scaling == "tensor":
        blocks = magnitude[..., None, :, None, :]
        scales = q.scale[..., None, None]
    else:
        blocks = blocks_of(magnitude, fmt)
        scales = scale_values(q.scale, fmt, rows)[..., :: fmt.length if fmt.tiles else 1, :]
    *batch, down, height, across, length = blocks.shape
    inside = blocks_of(jnp.ones_like(magnitude), fmt) if fmt.scaling != "tensor" else jnp.ones_like(blocks)
    flat, real = (jnp.moveaxis(b, -3, -2).reshape(*batch, down, across, height * length) for b in (blocks, inside > 0))
    largest = flat.max(axis=-1, initial=0)
    median = _median(jnp.where(real, flat, jnp.inf), real.sum(axis=-1, keepdims=True))
    used, spread = largest > 0, (largest > 0) & (median > 0)
    smallest = jnp.where(used, scales, jnp.inf).min(initial=jnp.inf)
    codes = jax.lax.bitcast_convert_type(q.scale, jnp.uint8) if fmt.scaling in _FLOORS else None
    at_floor = used & (codes <= _FLOORS[fmt.scaling]) if codes is not None else jnp.zeros_like(used)
    return {
        "smallest_scale": jnp.where(used.any(), smallest, 0),
        "largest_scale": jnp.where(used, scales, 0).max(initial=0),
        "floor": _share(at_floor, used),
        "block_range": _mean(largest / jnp.where(spread, median, 1), spread),
    }


def _median(x: jax.Array, count: jax.Array) -> jax.Array:
    """The medians of the `count` smallest numbers of each line."""
    ascending, places = jnp.sort(x, axis=-1), jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    middle = [jnp.where(places == at, ascending, 0).sum(axis=-1) for at in ((count - 1) // 2, count // 2)]
    return middle[0] / 2 + middle[1] / 2


def _outliers(x: jax.Array) -> dict[str, jax.Array]:
    """How many elements are outliers, and where they are, before any rotation."""
    magnitude = jnp.abs(jnp.where(jnp.isfinite(x), x.astype(jnp.float32), 0))
    scaled = magnitude * _inverse_power(magnitude.max(initial=0))
    beyond = scaled > OUTLIER * jnp.sqrt(_sum(scaled * scaled) / max(x.size, 1))
    counts = _whole(beyond.sum(axis=tuple(range(x.ndim - 1))))
    most, places = jax.lax.top_k(jnp.pad(counts, (0, CHANNELS)), CHANNELS)
    return {"outliers": _fraction(beyond), "outlier_channels": jnp.where(most > 0, places, -1)}


def _rows(x: jax.Array, q: QuantizedArray) -> tuple[jax.Array, QuantizedArray]:
    """The elements that were rounded, blocks along the last axis, and their codes without a rotation."""
    if len(q.matrix_shape) == 1:
        scale = q.scale if q.format.scaling == "tensor" else q.scale[..., None, :]
        zero_point = None if q.zero_point is None else q.zero_point[..., None, :]
        shape = (1, *q.matrix_shape)
        q = dataclasses.replace(q, data=q.data[..., None, :], scale=scale, zero_point=zero_point, matrix_shape=shape)
        x = x[..., None, :]
    elif q.axis == -2:
        x, q = jnp.swapaxes(x, -1, -2), q.mT
    if q.hadamard is None:
        return x, q
    length = -(-x.shape[-1] // q.hadamard.size) * q.hadamard.size
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])
    return rotate_float32(x, q.hadamard, False), dataclasses.replace(q, hadamard=None, matrix_shape=x.shape[-2:])


def _filled(q: QuantizedArray, which: int) -> QuantizedArray:
    """The same blocks with every code that of their largest number (0), or of their smallest one (1)."""
    if not q.format.packed:
        code = jnp.asarray((q.format.maximum, -q.format.maximum)[which], q.data.dtype)
    else:
        code = jnp.uint8(((0xFF, 0x00) if q.format.element == "int4" else (0x77, 0xFF))[which])
    return dataclasses.replace(q, data=jnp.full_like(q.data, code))


def _whole(x: jax.Array) -> jax.Array:
    """The same on every device."""
    sharding = sharding_of(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))


def _inverse_power(amax: jax.Array) -> jax.Array:
    """A power of two that brings amax near 1, so that squares stay within float32's range; products by it are exact."""
    exponent = jnp.clip(jax.lax.bitcast_convert_type(amax, jnp.uint32) >> 23, 1, 253)
    return from_bits((254 - exponent) << 23)


def _without_subnormals(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0, x)


def _sum(x: jax.Array) -> jax.Array:
    """The sum of float32 numbers, line by line: of many lines none gets lost in a long sum."""
    return x.sum(axis=-1).sum()


def _fraction(mask: jax.Array) -> jax.Array:
    return _sum(mask.astype(jnp.float32)) / max(mask.size, 1)


def _share(mask: jax.Array, of: jax.Array) -> jax.Array:
    return _mean(mask.astype(jnp.float32), of)


def _mean(x: jax.Array, of: jax.Array) -> jax.Array:
    """The mean of the chosen ones; 0 if there are none."""
    return _sum(jnp.where(of, x, 0)) / jnp.maximum(_sum(of.astype(jnp.float32)), 1)
