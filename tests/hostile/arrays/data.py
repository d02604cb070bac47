"""Seeded arrays of hostile numbers, made of their bits: any NaN, denormals, ties, blocks that underflow or overflow."""

import ml_dtypes
import numpy as np

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
_BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
# Between numbers of E2M1, E4M3 and E5M2, and where their ranges end; times any power of two they meet scaled elements.
_TIES = (
    0.25,
    0.75,
    1.25,
    1.75,
    2.5,
    3.5,
    5.0,
    6.0,
    7.0,
    7.5,
    9 / 8,
    17 / 16,
    19 / 16,
    232,
    240,
    448,
    464,
    61440,
    57344,
)


def _special_bits(dtype):
    """Zeros, the ends of the normal and subnormal numbers, infinities, quiet and signalling NaN with payloads."""
    mantissa = MANTISSA[dtype]
    width = 8 * np.dtype(_BITS[dtype]).itemsize
    exponents = 2 ** (width - 1 - mantissa) - 1
    infinity = exponents << mantissa
    magnitudes = [0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, (1 << mantissa) + 1, infinity - 1, infinity]
    magnitudes += [infinity + 1, infinity + (1 << (mantissa - 1)), infinity + (1 << mantissa) - 1]
    magnitudes += [e << mantissa for e in (exponents // 2, exponents // 2 + 1, exponents - 1)]
    return np.asarray([m | sign << (width - 1) for m in magnitudes for sign in (0, 1)], _BITS[dtype])


def _from_floats(x, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32).astype(DTYPES[dtype]).view(_BITS[dtype])


def _normal(rng, shape, dtype):
    return _from_floats(rng.standard_normal(shape) * np.exp2(rng.uniform(-30, 30)), dtype)


def _any_bits(rng, shape, dtype):
    return rng.integers(0, np.iinfo(_BITS[dtype]).max, shape, _BITS[dtype], endpoint=True)


def _finite_bits(rng, shape, dtype):
    """Of any exponent, so that neighbours are far apart."""
    bits = _any_bits(rng, shape, dtype)
    infinity = _special_bits(dtype)[14]
    return np.where((bits & infinity) == infinity, bits ^ _BITS[dtype](1 << MANTISSA[dtype]), bits).astype(bits.dtype)


def _ties(rng, shape, dtype):
    signs = rng.choice([-1.0, 1.0], shape)
    return _from_floats(rng.choice(_TIES, shape) * signs * np.exp2(rng.integers(-40, 40)), dtype)


def _same_everywhere(rng, shape, dtype):
    return np.broadcast_to(_any_bits(rng, (), dtype), shape).astype(_BITS[dtype])


def _denormal(rng, shape, dtype):
    """About the least normal number."""
    return (_any_bits(rng, shape, dtype) & _BITS[dtype]((4 << MANTISSA[dtype]) - 1)).astype(_BITS[dtype])


def _largest(rng, shape, dtype):
    """Next to the largest finite number."""
    top = int(_special_bits(dtype)[12])
    sign = rng.integers(0, 2, shape).astype(np.uint64) << np.uint64(8 * np.dtype(_BITS[dtype]).itemsize - 1)
    return (np.uint64(top) - rng.integers(0, 9, shape).astype(np.uint64) | sign).astype(_BITS[dtype])


def _rows_of_their_own(rng, shape, dtype):
    """Rows whose sizes differ by many powers of two, some of zeros: block scales underflow, amaxes are another's."""
    scale = np.exp2(rng.uniform(-60, 60, (*shape[:-1], 1))) * (rng.random((*shape[:-1], 1)) > 0.2)
    return _from_floats(rng.standard_normal(shape) * scale, dtype)


KINDS = (_normal, _any_bits, _finite_bits, _ties, _same_everywhere, _denormal, _largest, _rows_of_their_own)


def numbers(rng, count, shape, dtype):
    """[count, *shape] of a float dtype, each of the `count` arrays of a kind of its own, some with a few specials."""
    bits = np.empty((count, *shape), _BITS[dtype])
    special = _special_bits(dtype)
    for i in range(count):
        bits[i] = KINDS[rng.integers(len(KINDS))](rng, shape, dtype)
        if bits[i].size and rng.random() < 0.3:
            places = rng.integers(0, bits[i].size, rng.integers(1, 4))
            bits[i].reshape(-1)[places] = rng.choice(special, len(places))
    return bits.view(DTYPES[dtype])


def float32_numbers(rng, shape, signed=True):
    """float32 of any size, a few of them special."""
    bits = rng.integers(0, 2**32, shape, np.uint32)
    plain = (np.exp2(rng.uniform(-20, 20, shape)) * rng.choice([-1.0, 1.0], shape)).astype(np.float32).view(np.uint32)
    chosen = np.where(rng.random(shape) < 0.3, bits, plain)
    chosen = np.where(rng.random(shape) < 0.1, rng.choice(_special_bits("float32"), shape), chosen).astype(np.uint32)
    chosen = chosen if signed else chosen & np.uint32(0x7FFFFFFF)
    return chosen.view(np.float32)


def bytes_of_any_kind(rng, shape):
    """uint8: any, or all from few, as codes and scales that nothing was quantised to."""
    any_bytes = rng.integers(0, 256, shape, np.uint8)
    few = rng.choice(np.asarray([0, 0x08, 0x77, 0x7E, 0x7F, 0x80, 0xFE, 0xFF], np.uint8), shape)
    return np.where(rng.random(shape) < rng.choice([0.0, 0.05, 1.0]), few, any_bytes).astype(np.uint8)
