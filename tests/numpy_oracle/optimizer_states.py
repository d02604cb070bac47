"""Codes of optimizer states and remainders of master weights (numerics.md 19), by values in float64, where every number
here is exact."""

import zlib

import numpy as np

from tests.numpy_oracle.random_bits import philox

BLOCK = 32
NAN = np.array(0x7FC00000, np.uint32).view(np.float32)


def leaf_words(key, step, path, stream):
    """uint32 [2]: the words of a leaf in a step."""
    counter = np.array([step, zlib.crc32(path.encode()), 0, stream], np.uint32)
    return philox(counter, np.array(key, np.uint32))[:2]


def half_words(shape, words):
    """int64 [...]: the draw of each element."""
    *lead, columns = shape
    rows, column = np.arange(int(np.prod(lead))), np.arange(columns)
    counter = np.zeros((len(rows), columns, 4), np.uint32)
    counter[..., 0], counter[..., 1], counter[..., 2] = column // 8, rows[:, None], 13
    drawn = philox(counter, np.broadcast_to(np.array(words, np.uint32), (*counter.shape[:2], 2)))
    word = np.take_along_axis(drawn, np.broadcast_to(column % 8 // 2, (len(rows), columns))[..., None], -1)[..., 0]
    return (word.astype(np.int64) >> (16 * (column % 2)) & 0xFFFF).reshape(shape)


def _blocks(x, fill=0):
    """[..., ceil(C / 32), 32]."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    return np.pad(x, pad, constant_values=fill).reshape(*x.shape[:-1], -1, BLOCK)


def _normal(x):
    """|x| in float64, without subnormals; which are not finite; which are below 0."""
    with np.errstate(invalid="ignore"):
        x = np.asarray(x).astype(np.float32).astype(np.float64)
    magnitude = np.where(np.abs(x) < 2.0**-126, 0, np.abs(x))
    return magnitude, ~np.isfinite(x), (x < 0) & (magnitude > 0)


def encode_relative(x, signed, draws=None):
    """Codes [..., C] and exponents; `draws`: as `half_words` gives them, None rounds to nearest."""
    magnitude, special, negative = _normal(x)
    finite = np.where(special, 0, magnitude)
    exponent = np.frexp(finite)[1] - 1
    added = 0.5 if draws is None else (16 * draws + 8) / 2**20
    eighths = np.floor(np.ldexp(finite, 3 - exponent) + added).astype(np.int64)  # 8 to 16
    rank = np.where(finite == 0, 0, np.minimum(8 * (exponent + 127) + eighths - 8, 2039))
    rank = np.where(special | (negative & (not signed)), 2040, rank)
    exponents = _blocks(rank).max(-1) // 8
    top = 127 if signed else 255
    each = np.repeat(exponents, BLOCK, -1)[..., : rank.shape[-1]]
    code = np.maximum(rank - (8 * each + 7) + top, 0 if signed else 1)
    code = np.where((finite == 0) & ~special, 0, code)
    if signed:
        code = np.where(negative & (code > 0), code + 128, code)
    return code.astype(np.uint8), exponents.astype(np.uint8)


def decode_relative(codes, exponents, signed):
    """float32 [..., C]."""
    code, top = codes.astype(np.int64), 127 if signed else 255
    each = np.repeat(exponents.astype(np.int64), BLOCK, -1)[..., : code.shape[-1]]
    magnitude = code % 128 if signed else code
    rank = np.maximum(magnitude + 8 * each + 7 - top, 8)
    value = np.where(magnitude == 0, 0, np.ldexp(1 + rank % 8 / 8, rank // 8 - 127))
    value = np.where(each == 255, np.nan, value)
    return np.where(code // 128 * signed == 1, -value, value).astype(np.float32)


def encode_fixed(x, draws=None):
    """Codes int8 [..., C] and exponents."""
    magnitude, special, negative = _normal(x)
    largest = _blocks(np.where(special, np.inf, magnitude)).max(-1)
    bad = ~np.isfinite(largest)
    exponents = np.frexp(np.where(bad, 0, largest))[1] + 126
    exponents += np.where(bad, 0, largest) > np.ldexp(127.0, exponents - 133)
    exponents = np.where(largest == 0, 0, np.where(bad, 255, np.minimum(exponents, 254)))
    each = np.repeat(exponents, BLOCK, -1)[..., : magnitude.shape[-1]]
    added = 0.5 if draws is None else (2 * draws + 1) / 2**17
    code = np.floor(np.ldexp(np.where(each == 255, 0, magnitude), 133 - each) + added)
    code = np.where(each == 255, 0, np.minimum(code, 127))
    return np.where(negative, -code, code).astype(np.int8), exponents.astype(np.uint8)


def decode_fixed(codes, exponents):
    """float32 [..., C]."""
    each = np.repeat(exponents.astype(np.int64), BLOCK, -1)[..., : codes.shape[-1]]
    value = np.ldexp(codes.astype(np.float64), each - 133)
    value = np.where(np.abs(value) < 2.0**-126, 0, value)
    return np.where(each == 255, np.nan, value).astype(np.float32)


def split(weight, bits, draws=None):
    """The bits of bfloat16, and the remainder as a whole number (None with 16 bits)."""
    b = np.asarray(weight, np.float32).view(np.uint32).astype(np.int64)
    magnitude = b % 2**31
    b = np.where(magnitude > 0x7F800000, 0x7FC00000, b)
    finite = magnitude < 0x7F800000
    if bits == 16:
        return ((b + np.where(finite, draws, 0)) // 2**16).astype(np.uint16), None
    if bits == 24:
        b = np.where(finite, (b + 128) // 256 * 256, b)
    upper = (b + 2**15) // 2**16
    rest = b - upper * 2**16
    return upper.astype(np.uint16), rest.astype(np.int16) if bits == 32 else (rest // 256).astype(np.int8)


def join(upper, rest, bits):
    """The float32 weights of the bits of bfloat16 and a remainder."""
    low = 0 if rest is None else rest.astype(np.int64) * (256 if bits == 24 else 1)
    return ((upper.astype(np.int64) * 2**16 + low) % 2**32).astype(np.uint32).view(np.float32)


def rounded(x):
    """float64 as float32 numbers: zero where they are below the smallest normal number after rounding to 24 bits.

    Sums, products, quotients and roots of float32 numbers may be rounded to float64 first: that changes no float32.
    """
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float64)
        below = (np.abs(x) < 2.0**-120) & (np.abs(np.float32(x * 2.0**100)) < 2.0**-26)
        return np.where(below, np.copysign(0, x), x.astype(np.float32)).astype(np.float64)


def stored(x):
    """float64 as float32 numbers, every NaN the same."""
    return np.where(np.isnan(x), NAN, x).astype(np.float32)


def optimizer_update(g, p, rest, mu, nu, scalars, words, codes, bits, is_update=False, rule="adamw"):
    """The new parameter or its update, the new remainder, and the new moments; (codes, exponents) of those in 8 bits.

    Arguments:
        g, p: float32 or bfloat16 [..., C].
        mu, nu: float32 [..., C], or codes and exponents. With Lion nu is None, and the new one, too.
        scalars: float32 [9], Lion's [6].
        words: uint32 [2, 2].
        codes: the rounding of each moment, None for float32.
    """
    b1, c1, b2, c2, *corrections, decay, minus_rate = rounded(scalars)
    is_float32 = p.dtype == np.float32
    weight = rounded(p if is_float32 else join(p.view(np.uint16), rest, bits))
    moments = [
        rounded(s if rounding is None else decode_relative(*s, signed))
        for s, rounding, signed in zip((mu, nu), codes, (True, False), strict=True)
        if s is not None
    ]
    with np.errstate(all="ignore"):
        g = rounded(g.astype(np.float32))
        first = rounded(rounded(c1 * g) + rounded(b1 * moments[0]))
        if rule == "lion":
            moments, u = [rounded(rounded(c2 * g) + rounded(b2 * moments[0]))], np.sign(first)
            u = np.where(first == 0, first, u)
        else:
            k1, k2, epsilon = corrections
            moments = [first, rounded(rounded(c2 * rounded(g * g)) + rounded(b2 * moments[1]))]
            denominator = rounded(rounded(np.sqrt(rounded(moments[1] / k2))) + epsilon)
            u = rounded(rounded(first / k1) / denominator)
        update = rounded(minus_rate * rounded(u + rounded(decay * weight)))
        moments = [
            stored(x)
            if rounding is None
            else encode_relative(stored(x), signed, half_words(x.shape, words[0]) if rounding == "stochastic" else None)
            for x, rounding, signed in zip(moments, codes, (True, False), strict=False)
        ]
        moments += [None] * (rule == "lion")
        weight = rounded(weight + update)
        if is_float32:
            return stored(update if is_update else weight), None, *moments
        weight = stored(weight)
        if bits is None:
            b = weight.view(np.uint32).astype(np.int64)
            nearest = (b + 0x7FFF + b // 2**16 % 2) // 2**16
            upper, rest = np.where(np.isnan(weight), b // 2**16, nearest).astype(np.uint16), None
        else:
            upper, rest = split(weight, bits, half_words(p.shape, words[1]))
        if not is_update:
            return upper.view(p.dtype), rest, *moments
        new, old = (rounded(join(bits_of, None, 16)) for bits_of in (upper, p.view(np.uint16)))
        return stored(rounded(new - old)), rest, *moments
