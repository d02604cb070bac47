"""FP8 products as tensor cores of compute capability 8.9 and 9.0 add them up: docs/explanation/exact_sums.md."""

import numpy as np

FRACTION_BITS = 13


def _unit(largest):
    """Of the last bit that is kept beside a number, or sum, of this magnitude."""
    return np.ldexp(1.0, np.frexp(largest)[1] - 1 - FRACTION_BITS)


def _cut(x, unit):
    return np.trunc(x / unit) * unit


def fp8_product(a, b, instruction=32, promotion=128):
    """float64 a [M, K] @ b [N, K] transposed, of numbers that FP8 holds.

    An instruction aligns `instruction` products and the running sum with the largest of them, cuts each, adds them up
    and cuts the sum. After `promotion` of K the running sum goes to one in float32; None: at the end alone, which is
    what "fast accumulation" means.
    """
    depth = a.shape[1]
    total, running = np.zeros((a.shape[0], b.shape[0]), np.float32), np.zeros((a.shape[0], b.shape[0]))
    for k in range(0, depth, instruction):
        end = min(depth, k + instruction)
        terms = np.concatenate([running[..., None], a[:, None, k:end] * b[None, :, k:end]], axis=-1)
        unit = _unit(np.abs(terms).max(axis=-1))
        found = _cut(terms, unit[..., None]).sum(axis=-1)
        running = _cut(found, _unit(np.abs(found)))
        if end == depth or (promotion is not None and end % promotion == 0):
            total, running = (total + running.astype(np.float32)).astype(np.float32), np.zeros_like(running)
    return total.astype(np.float64)
