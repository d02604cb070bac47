"""The numbers of 4- and 8-bit floats, and the codes that numbers become (numerics.md 2 and 4 to 7)."""

import ml_dtypes
import numpy as np

from tests.numpy_oracle.float32 import F

ELEMENTS = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MANTISSA_BITS = {"e2m1": 1, "e4m3": 3, "e5m2": 2}
GRIDS = {  # the numbers of codes 0, 1, ...
    name: np.array([v for v in np.arange(128, dtype=np.uint8)[: 8 if name == "e2m1" else 128].view(t).astype(float)])
    for name, t in ELEMENTS.items()
}
GRIDS = {name: grid[np.isfinite(grid)] for name, grid in GRIDS.items()}


def encode(x, multiplier, element, byte=None):
    """Codes of x * multiplier, saturating; of x that is not finite, NaN."""
    grid = GRIDS[element]
    a = np.minimum(np.abs(np.where(np.isfinite(x), x * multiplier, F(0))), F(grid[-1]))
    if byte is None:
        code = a.astype(ELEMENTS[element]).view(np.uint8)
    else:
        a = a.astype(np.float64)
        low = np.minimum(np.searchsorted(grid, a, side="right") - 1, len(grid) - 2)
        fraction = (a - grid[low]) / (grid[low + 1] - grid[low])
        code = (low + (fraction >= (255.5 - byte) / 256)).astype(np.uint8)
    code = np.where(np.isfinite(x), code, 0x7F)
    return code | (np.signbit(x) * np.uint8(8 if element == "e2m1" else 0x80))


def encode_e2m1(x, multiplier):
    return encode(x, multiplier, "e2m1")
