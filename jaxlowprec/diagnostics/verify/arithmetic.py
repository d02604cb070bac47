"""The float32 operations that quantisers rest on, on the device: multiply, add, subtract and compare against NumPy's,
which are IEEE's, and products at the highest precision against float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.diagnostics.verify import inputs
from jaxlowprec.diagnostics.verify.products import Product

_DEPTH = 512

OPERATIONS: dict[str, Callable] = {
    "multiply": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "compare": lambda x, y: (x < y).astype(x.dtype) + (x == y).astype(x.dtype) * 2,
}
"""Elementwise, of arrays of JAX or of NumPy."""


def elementwise(operation: str, device: jax.Device) -> tuple[np.ndarray, np.ndarray]:
    """Results of the device for 1M pairs of float32, and those of IEEE 754."""
    pairs = inputs.pairs()
    found = jax.jit(OPERATIONS[operation])(*jax.device_put(pairs, device))
    return np.asarray(found), OPERATIONS[operation](*pairs)


def highest(device: jax.Device) -> Product:
    """A product of float32 matrices at the highest precision: K + 8 roundings are allowed for, as of six passes."""
    a, b = inputs.spread((256, _DEPTH), 110, -6, 6), inputs.spread((_DEPTH, 128), 112, -6, 6)
    y = jnp.matmul(*jax.device_put((a, b), device), precision=jax.lax.Precision.HIGHEST)
    a, b = a.astype(np.float64), b.astype(np.float64)
    return Product(np.asarray(y, np.float64), a @ b, (_DEPTH + 8) * 2.0**-24 * (np.abs(a) @ np.abs(b)))
