// 16 elements to codes: scaled, rounded, packed. The same codes as numerics/ makes one at a time, in forms that take fewer
// instructions (tests/cuda/quantize_test.cc compares them).
//
// To nearest, E2M1 codes are the least of three lines, each rounded by the addition of 1.5 * 2^23, and 8-bit codes are the
// hardware's where it has the conversion. Stochastic rounding adds random bits below the code in float32's own bits: above
// the least normal number a float's exponent and mantissa count codes, below it the grid is even, and in a + max(a, least)
// both are one: bits that count codes from `least` on. Truncating that sum loses only what no random byte can tell apart.
#pragma once

#include "tile_elements.cuh"

namespace jaxlowprec {
namespace cuda {

/// Words of the codes of 16 elements.
template <class Code>
constexpr int kCodeWords = Code::kPacked ? 2 : 4;

// --- E2M1

JLP_DEVICE uint32_t e2m1_nearest_bits(float a) {
  constexpr float kMagic = 12582912.0f;
  const float small = __fmaf_rn(a, 2.0f, kMagic), middle = __fadd_rn(a, kMagic + 2.0f),
              large = __fmaf_rn(a, 0.5f, kMagic + 4.0f);
  return static_cast<uint32_t>(
      __vimin3_s32(static_cast<int>(as_bits(small)), static_cast<int>(as_bits(middle)), static_cast<int>(as_bits(large))));
}

/// `codes`, and the signs of eight 16-bit elements in four words at bits 3, 7, ...: even elements' and odd ones' are
/// gathered.
JLP_DEVICE uint32_t with_signs(uint32_t codes, const uint32_t* words) {
  const uint32_t first = __byte_perm(words[0], words[1], 0x7351), second = __byte_perm(words[2], words[3], 0x7351);
  const uint32_t even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
  return and_or(odd, 0x80808080u, and_or(even >> 4, 0x08080808u, codes));
}

/// The signs of four words, rows r to r + 3 of two columns of 16-bit elements, at bits 3, 7, ... of the columns' halves.
JLP_DEVICE uint32_t signs_of_four(const uint32_t* words) {
  return and_or(words[0] >> 12, 0x00080008u,
                and_or(words[1] >> 8, 0x00800080u, and_or(words[2] >> 4, 0x08000800u, words[3] & 0x80008000u)));
}

/// `codes`, and bits 3, 7, ... of elements 8 * half to 8 * half + 7 that are negative and not zero.
template <class E>
JLP_DEVICE uint32_t with_signs(uint32_t codes, const Sixteen<E>& sixteen, int half) {
  if constexpr (E::kBytes == 4) {
    uint32_t signs = codes;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = __fadd_rn(as_float(sixteen.words[8 * half + i]), 0.0f);  // -0, and what is subnormal, become +0
      signs |= (as_bits(x) & kSignBit) >> (28 - 4 * i);
    }
    return signs;
  } else {
    const uint32_t* words = sixteen.words + 4 * half;
    const uint32_t negative[4] = {E::negative(words[0]), E::negative(words[1]), E::negative(words[2]),
                                  E::negative(words[3])};
    return with_signs(codes, negative);
  }
}

// --- stochastic rounding

/// What is added to the counting bits: (byte, 0.5) of 256 below the code, since 255.5 - byte steps of 256 are up; and at the
/// top the least normal number's own bits are taken away.
template <class Code>
struct StochasticAddend {
  static constexpr int kShift = 1 + Code::kMantissaBits;  // so that codes start at bit 24
  static constexpr uint32_t kLeastExponent = 127 + 1 - Code::kBias;
  const uint32_t bits = kept(0x8000u | ((0u - (kLeastExponent << (23 + kShift))) & 0xFF000000u));
};

/// The magnitude code of a >= 0 in the top byte; the bits below are arbitrary. `random` holds the byte. What is above the
/// largest code's value must saturate before or after.
template <class Code>
JLP_DEVICE uint32_t stochastic_top_byte(float a, const StochasticAddend<Code>& addend, uint32_t random, int byte) {
  const float counted = __fadd_rz(a, fmaxf(a, Code::kMinNormal));
  const uint32_t added = __byte_perm(random, addend.bits, 0x7054u | (static_cast<uint32_t>(byte) << 8));
  return (as_bits(counted) << StochasticAddend<Code>::kShift) + added;
}

/// Eight E2M1 codes of which those of magnitudes from 6 to below 8 may be 8: that of 6 instead.
JLP_DEVICE uint32_t saturated_nibbles(uint32_t codes) { return codes - (codes >> 3 & 0x11111111u); }

/// The top bytes of four words, in order.
JLP_DEVICE uint32_t top_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

/// Eight E2M1 codes that are at the top of words. kSaturate: magnitudes are below 8, not 6.
template <bool kSaturate>
JLP_DEVICE uint32_t e2m1_of_top_bytes(const uint32_t (&v)[8]) {
  const uint32_t even = top_bytes(v[0], v[2], v[4], v[6]), odd = top_bytes(v[1], v[3], v[5], v[7]);
  const uint32_t codes = even + (odd << 4);
  return kSaturate ? saturated_nibbles(codes) : codes;
}

// --- 16 elements

/// E2M1 codes of elements 8 * half to 8 * half + 7. Without kSaturate those of elements from 7 on are wrong, but where the
/// hardware converts.
template <bool kStochastic, bool kSaturate, class E>
JLP_DEVICE uint32_t encode_e2m1(const Sixteen<E>& sixteen, int half, float encode, const uint32_t (&random)[4]) {
  const auto magnitude = [&](int i) { return __fmul_rn(fabsf(value(sixteen, 8 * half + i)), encode); };
  if constexpr (!kStochastic && kHasE2M1Conversion) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float low = __fmaf_rn(value(sixteen, 8 * half + i), encode, 0.0f);
      const float high = __fmaf_rn(value(sixteen, 8 * half + i + 1), encode, 0.0f);
      codes |= e2m1x2_hardware(low, high) << (4 * i);
    }
    return codes;
  } else if constexpr (!kStochastic) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      const float a = magnitude(i);
      codes = (codes << 4) + e2m1_nearest_bits(kSaturate ? fminf(a, kE2M1Max) : a);
    }
    return with_signs(codes - kE2M1MagicBits * 0x11111111u, sixteen, half);
  } else {
    const StochasticAddend<E2M1> addend;
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = magnitude(i);
      v[i] = stochastic_top_byte<E2M1>(kSaturate ? fminf(a, kE2M1Max) : a, addend, random[2 * half + i / 4], i % 4);
    }
    return with_signs(e2m1_of_top_bytes<!kSaturate>(v), sixteen, half);
  }
}

/// Four 8-bit floats, saturating, by the bytes of `random` if kStochastic. What is not finite gives an arbitrary code.
template <class Code, bool kStochastic>
JLP_DEVICE uint32_t float8_codes(const float (&y)[4], uint32_t random) {
  if constexpr (kStochastic) {
    const StochasticAddend<Code> addend;
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = stochastic_top_byte<Code>(fminf(fabsf(y[i]), Code::kMax), addend, random, i) | (as_bits(y[i]) & kSignBit);
    return top_bytes(v[0], v[1], v[2], v[3]);
  } else if constexpr (kHasFloat8Conversion<Code>) {
    return float8x2_hardware<Code>(y[0], y[1]) | float8x2_hardware<Code>(y[2], y[3]) << 16;
  } else {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = float8_magnitude_bits<Code>(fminf(fabsf(y[i]), Code::kMax)) - kFloat8Offset<Code>;
      codes |= (code | ((as_bits(y[i]) >> 24) & 0x80u)) << (8 * i);
    }
    return codes;
  }
}

/// 8-bit codes of elements 4 * quarter to 4 * quarter + 3.
template <class Code, bool kStochastic, class E>
JLP_DEVICE uint32_t encode_float8(const Sixteen<E>& sixteen, int quarter, float encode, const uint32_t (&random)[4]) {
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = __fmaf_rn(value(sixteen, 4 * quarter + i), encode, 0.0f);
  return float8_codes<Code, kStochastic>(y, random[quarter]);
}

/// Codes of a sixteen. `below_7`: no scaled element is larger.
template <class Code, bool kStochastic, class E>
JLP_DEVICE void encode_sixteen(const Sixteen<E>& sixteen, float encode, bool below_7, const uint32_t (&random)[4],
                               uint32_t (&codes)[kCodeWords<Code>]) {
  if constexpr (!Code::kPacked) {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = encode_float8<Code, kStochastic>(sixteen, i, encode, random);
  } else if (!kStochastic && (kHasE2M1Conversion || below_7)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) codes[half] = encode_e2m1<kStochastic, false>(sixteen, half, encode, random);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) codes[half] = encode_e2m1<kStochastic, true>(sixteen, half, encode, random);
  }
}

/// Elements that are not finite become NaN with their sign, where no block's scale says so (numerics.md 1 and 7).
template <class E>
JLP_DEVICE void put_nan_codes(const Sixteen<E>& sixteen, uint32_t (&codes)[4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t word = sixteen.words[i * E::kBytes / 4];
    const uint32_t bits = E::kBytes == 4 || i % 2 ? word : word << 16;  // the element's at the top
    const uint32_t nan = (0x7Fu | (bits >> 24 & 0x80u)) << (8 * (i % 4));
    if ((bits & kMagnitudeBits) >= E::kInfinity) codes[i / 4] = (codes[i / 4] & ~(0xFFu << (8 * (i % 4)))) | nan;
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
