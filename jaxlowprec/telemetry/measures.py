"""The statistics of a quantised tensor: one vector of numbers, and their names."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.ops.checks import float_array
from jaxlowprec.ops.statistics.finish import CHANNELS, LENGTH, OCTAVES, SCALARS
from jaxlowprec.ops.statistics.reference import CODES
from jaxlowprec.telemetry.counting import measured, source

_PARTS = {"codes": CODES, "scales": OCTAVES, "outlier_channels": CHANNELS, "channel_shares": CHANNELS}
_FIRST = dict(zip(_PARTS, np.cumsum([len(SCALARS), *_PARTS.values()]).tolist(), strict=False))

NUMBERS = (*(name for name in SCALARS if name not in ("uses", "square_error")), "relative_error", "sqnr")
"""The names in `Statistics.scalars`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """The error that quantising makes in a tensor, as statistics.

    Elements are those that were rounded: after the rotation, if there was one, with its padding to whole transforms.
    Fractions are of all elements unless they say otherwise. Errors, and so the SQNR and the bias, leave out elements
    that are not finite or decode to no finite number.

    Statistics of several uses of a layer, or of several microbatches, can be added up: each number then is the mean
    over the uses. The outlier channels of a sum are unknown.

    Attributes:
        values: float32 [..., LENGTH]: the number of uses, and sums over the uses of all that follows.
        uses: how many tensors were measured; 0: none was.
        zeros: fraction of elements that are zero.
        underflow: fraction that is not zero and becomes zero.
        saturation: fraction beyond the largest number of their block, and so cut off. Where that number is zero they
            underflow.
        nonfinite: fraction that is infinite or NaN.
        poisoned: fraction that is finite and decodes to no finite number, because of another element.
        square_error: energy of the errors over that of the elements.
        relative_error: its root.
        sqnr: its inverse in decibels; infinite without errors.
        bias: the sum of the errors over the sum of the magnitudes: 0 if rounding is unbiased.
        amax: the largest finite magnitude.
        rms: the root mean square of the finite elements, before any rotation.
        smallest_scale, largest_scale: of the blocks with elements other than zero, as they are stored; scales of more
            than a byte are rounded down to a power of two.
        floor: fraction of those blocks at the smallest positive scale; 0 for scales in float32.
        block_range: mean of the largest magnitude over the median one, of the elements along the quantised axis that
            share a scale (of runs of 128 for one scale per tensor); of whole runs whose median is not zero, in every
            16th line.
        outliers: fraction of elements beyond six times the root mean square, before any rotation.
        codes: [..., 32]: fraction of elements by code: of 4-bit codes by the code, of 8-bit floats by its exponent.
        scales: [..., 32]: fraction of the blocks that are not zero by how many octaves their scale lies below the
            largest one; a scale of zero is in the last place.
        outlier_channels: [..., 4]: the places along the tensor's last axis with the most outliers, most first; -1 where
            there are fewer, and for more or less than one use.
        channel_shares: [..., 4]: the fraction of the outliers that lie there.
    """

    values: Any

    def __getattr__(self, name: str) -> Any:
        if name in SCALARS:
            return self._mean(SCALARS.index(name)) if name != "uses" else self.values[..., 0]
        if name in _PARTS:
            return self._mean(slice(_FIRST[name], _FIRST[name] + _PARTS[name]))
        raise AttributeError(f"Statistics has no attribute {name!r}")

    def _mean(self, places: int | slice) -> Any:
        uses = self.values[..., 0] if isinstance(places, int) else self.values[..., :1]
        return self.values[..., places] / self._numpy.maximum(uses, 1)

    @property
    def _numpy(self) -> Any:
        """numpy for numbers on the host."""
        return np if isinstance(self.values, np.ndarray) else jnp

    @property
    def relative_error(self) -> Any:
        """Norm of the errors over norm of the elements."""
        return self._numpy.sqrt(self.square_error)

    @property
    def sqnr(self) -> Any:
        """The signal-to-noise ratio of quantisation, in decibels."""
        error, where = self.square_error, self._numpy.where
        return where(error == 0, jnp.inf, -10 * self._numpy.log10(where(error == 0, 1, error)))

    @property
    def outlier_channels(self) -> Any:
        """int32 [..., 4]."""
        first = _FIRST["outlier_channels"]
        found = self.values[..., first : first + CHANNELS]
        known = (self.values[..., :1] == 1) & ~self._numpy.isnan(found)
        return self._numpy.where(known, found, -1).astype(jnp.int32)

    def scalars(self) -> dict[str, float]:
        """The numbers that are known by name, for a logger; without the distributions and the channels."""
        numbers = {name: float(getattr(self, name)) for name in NUMBERS}
        return {name: number for name, number in numbers.items() if not math.isnan(number)}

    def __str__(self) -> str:
        return "\n".join(f"{name:16} {value:.4g}" for name, value in self.scalars().items())


ERROR = ("uses", "square_error")
"""The statistics of a GEMM's result."""


def of_gemm(values: Any) -> Statistics:
    """`Statistics` of a GEMM, from what is known of it; all else is NaN."""
    row = np.full(LENGTH, np.nan)
    row[[SCALARS.index(name) for name in ERROR]] = values
    return Statistics(row)


@jax.jit
def statistics(x: Float[Array, "..."], q: QuantizedArray) -> Statistics:
    """Measures the error of q, the quantised form of x.

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
    return Statistics(measured([source(x)], [(x, q)])[0])
