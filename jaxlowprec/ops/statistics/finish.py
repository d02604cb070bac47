"""The statistics of a tensor from its counts and sums: the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlowprec.ops.statistics import reference

SCALARS = (
    "uses",
    "zeros",
    "underflow",
    "saturation",
    "nonfinite",
    "poisoned",
    "square_error",
    "bias",
    "amax",
    "rms",
    "smallest_scale",
    "largest_scale",
    "floor",
    "block_range",
    "outliers",
)
"""The names of the first numbers of a vector of statistics; see `Statistics`."""

OCTAVES, CHANNELS = 32, 4
LENGTH = len(SCALARS) + reference.CODES + OCTAVES + 2 * CHANNELS
"""How many numbers a vector has: these, elements by code, blocks by octave, channels and their shares."""

_FLOORS = {"two_level": 1, "e8m0": 0}  # the code of the smallest positive scale


def finished(known: Sequence[jax.Array], scalings: tuple[str, ...]) -> jax.Array:
    """The vectors of n tensors [..., n, LENGTH].

    Arguments:
        known: sums [..., n, reference.LENGTH]; amax, rms and outliers [..., n], see `jaxlowprec.telemetry.Statistics`;
            channels [..., n, 2 * CHANNELS]: places, and shares of the outliers.
        scalings: of the formats of the n tensors.
    """
    sums, amax, rms, outliers, channels = known
    found = {name: sums[..., i] for i, name in enumerate(reference.SUMS)}
    elements = found["elements"]
    of_scales, octaves = _of_scales(sums[..., reference.SCALES_FROM : reference.CODES_FROM], scalings)
    scalars = {name: found[name] / elements for name in reference.SUMS[1:6]}
    scalars |= of_scales | {
        "uses": jnp.ones_like(elements),
        "square_error": _ratio(found["square_error"], found["energy"]),
        "bias": _ratio(found["error"], found["magnitude"]),
        "amax": amax,
        "rms": rms,
        "block_range": _ratio(found["ranges"], found["runs"]),
        "outliers": outliers,
    }
    first = jnp.stack([scalars[name] for name in SCALARS], axis=-1)
    codes = sums[..., reference.CODES_FROM :] / elements[..., None]
    return jnp.concatenate([first, codes, octaves, channels], axis=-1)


def _ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """part / whole; 0 where there is nothing."""
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)


@functools.cache
def _scale_table(scaling: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The value of each bin of scales, -1 where that is no number; its octave; whether it is the smallest scale."""
    codes = np.arange(reference.SCALES, dtype=np.uint8)
    values = 2.0 ** (codes - 127.0)
    if scaling == "two_level":
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    usable = (values >= 0) & np.isfinite(values) & (codes < 0xFF)
    octaves = np.floor(np.log2(np.where(usable & (values > 0), values, 2.0**-200))).astype(np.int32)
    values = np.where(usable, values, -1).astype(np.float32)
    return values, octaves, usable & (codes <= _FLOORS.get(scaling, -1))


def _of_scales(counts: jax.Array, scalings: tuple[str, ...]) -> tuple[dict[str, jax.Array], jax.Array]:
    """The statistics of scales [..., n], and their distribution [..., n, OCTAVES], from how many blocks have each."""
    values, octaves, floor = (np.stack(part) for part in zip(*map(_scale_table, scalings), strict=True))
    counts = jnp.where(values >= 0, counts, 0)
    used, total = counts > 0, jnp.maximum(counts.sum(axis=-1), 1)
    smallest = jnp.where(used, values, jnp.inf).min(axis=-1)
    below = jnp.clip(jnp.where(used, octaves, -1000).max(axis=-1, keepdims=True) - octaves, 0, OCTAVES - 1)
    here = below[..., None, :] == np.arange(OCTAVES)[:, None]
    found = {
        "smallest_scale": jnp.where(jnp.isfinite(smallest), smallest, 0),
        "largest_scale": jnp.where(used, values, 0).max(axis=-1),
        "floor": jnp.where(floor, counts, 0).sum(axis=-1) / total,
    }
    return found, jnp.where(here, counts[..., None, :], 0).sum(axis=-1) / total[..., None]
