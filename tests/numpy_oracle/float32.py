"""float32 as XLA's CPU threads have it: subnormals count as zero."""

import numpy as np

F = np.float32
MIN_NORMAL = F(2.0**-126)
MAX_FINITE = np.finfo(F).max


def flush(x):
    return np.where(np.abs(x) < MIN_NORMAL, np.copysign(F(0), x), x).astype(F)


def fma(a, b, c):
    """a * b + c rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there (its last bit is set where it is inexact), after
    which rounding to float32 is that of the exact sum: Boldo and Melquiond, "Emulation of FMA and Correctly Rounded
    Sums: Proved Algorithms Using Rounding to Odd", 2008.
    """
    p, c = np.broadcast_arrays(np.asarray(a, np.float64) * b, np.asarray(c, np.float64))
    s = p + c
    c_part = s - p
    error = (p - (s - c_part)) + (c - c_part)  # s + error is exact
    bits = s.view(np.int64)
    inexact = np.isfinite(s) & (error != 0)
    toward_zero = bits - (inexact & (np.signbit(error) != np.signbit(s)))
    odd = np.where(inexact, toward_zero | 1, bits)
    return flush(odd.view(np.float64).astype(F))
