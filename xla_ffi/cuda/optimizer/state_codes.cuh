// Eight codes of an optimizer's state to numbers and back (numerics.md 19), two elements in the halves of a word: the bytes
// that numerics/optimizer_states.h makes one at a time, in forms that take fewer instructions.
//
// The upper half of a float32 number is its rank, 16 times, and four bits that are dropped. A code is the rank less that of
// the code 0. Codes 0 and 2 of a word are in the halves of one word, 1 and 3 in those of another.
#pragma once

#include "../../numerics/optimizer_states.h"
#include "../intrinsics.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr uint32_t kEvenBytes = 0x00FF00FFu, kOddBytes = 0xFF00FF00u, kSignsOfHalves = 0x80008000u,
                   kSignsOfBytes = 0x80808080u;

JLP_DEVICE uint32_t in_both_halves(uint32_t half) { return __byte_perm(half, 0u, 0x1010); }

/// 16 times the rank of the code 0 of a block with this exponent.
template <bool kSigned>
JLP_DEVICE int rank_of_zero(uint32_t exponent) {
  return (static_cast<int>(8 * exponent + 7) - static_cast<int>(kStateTop<kSigned>)) * 16;
}

/// Exponents whose blocks have only normal numbers.
template <bool kSigned>
constexpr uint32_t kLeastExponent = kSigned ? 16 : 32;

/// Whether codes need another way: the block is poisoned, or its smallest numbers would be subnormal and it has any.
template <bool kSigned>
JLP_DEVICE bool has_rare_codes(const uint32_t (&codes)[2], uint32_t exponent) {
  const uint32_t least = codes[0] | codes[1] ? kLeastExponent<kSigned> : 0u;
  return exponent - least >= kStatePoison - least;
}

/// The numbers of eight codes that are not rare.
template <bool kSigned>
JLP_DEVICE void decode_eight(const uint32_t (&codes)[2], uint32_t exponent, float (&x)[8]) {
  constexpr uint32_t kMagnitudes = kSigned ? 0x7F7F7F7Fu : 0xFFFFFFFFu;
  const uint32_t zero_at = in_both_halves(static_cast<uint32_t>(rank_of_zero<kSigned>(exponent)));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t even = ((codes[i] & kEvenBytes & kMagnitudes) << 4) + zero_at;
    uint32_t odd = ((codes[i] & kOddBytes & kMagnitudes) >> 4) + zero_at;
    if (kSigned) even |= (codes[i] << 8) & kSignsOfHalves, odd |= codes[i] & kSignsOfHalves;
    x[4 * i] = Lanes<float>::from_bits(even << 16), x[4 * i + 2] = Lanes<float>::from_bits(even & 0xFFFF0000u);
    x[4 * i + 1] = Lanes<float>::from_bits(odd << 16), x[4 * i + 3] = Lanes<float>::from_bits(odd & 0xFFFF0000u);
  }
  // A sum with a magnitude that is not 0 carries to the sign of its byte. Few words have a code 0, or all have.
  const auto some = [&](uint32_t word) {
    return kSigned ? (word & kMagnitudes) + 0x7F7F7F7Fu : ~((word - 0x01010101u) & ~word);
  };
  if ((some(codes[0]) & some(codes[1]) & kSignsOfBytes) == kSignsOfBytes) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t top = codes[i / 4] << (24 - i % 4 * 8);
    if ((top & (kMagnitudes << 24)) == 0) x[i] = Lanes<float>::from_bits(kSigned ? top & kSignBit : 0u);
  }
}

/// Eight numbers, rounded: the halves of even and of odd elements of each four, with their signs and dropped bits.
struct RankedEight {
  uint32_t even[2], odd[2];

  /// `draws`: halves of words, in order; `below`: 0x80 of stochastic rounding. To nearest: halves of 0x8000, and 0.
  JLP_DEVICE RankedEight of(const float (&x)[8], const uint32_t (&draws)[4], uint32_t below) {
    RankedEight ranked;
    uint32_t sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sum[i] = (__byte_perm(draws[i / 2], below, i % 2 ? 0x5324 : 0x5104) >> 4) + Lanes<float>::bits(x[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ranked.even[i] = __byte_perm(sum[4 * i], sum[4 * i + 2], 0x7632);
      ranked.odd[i] = __byte_perm(sum[4 * i + 1], sum[4 * i + 3], 0x7632);
    }
    return ranked;
  }

  /// The largest of each half, without the signs if kSigned.
  template <bool kSigned>
  __device__ __forceinline__ uint32_t largest() const {
    constexpr uint32_t kMask = kSigned ? 0x7FFF7FFFu : 0xFFFFFFFFu;
    return __vmaxu2(__vimax3_u16x2(even[0] & kMask, even[1] & kMask, odd[0] & kMask), odd[1] & kMask);
  }

  /// The codes in a block whose exponent is 0 or kLeastExponent at least; of 0, all numbers are 0.
  template <bool kSigned>
  __device__ __forceinline__ void encode(uint32_t exponent, uint32_t (&codes)[2]) const {
    constexpr uint32_t kMask = kSigned ? 0x7FFF7FFFu : 0xFFFFFFFFu;
    const uint32_t less = in_both_halves(exponent ? 0u - static_cast<uint32_t>(rank_of_zero<kSigned>(exponent)) : 0x8000u);
    const auto lifted = [&](uint32_t half) {  // to the code 1 if it has no sign and is not 0
      return __viaddmax_s16x2(half & kMask, less, kSigned ? 0u : __vminu2(half, 0x00100010u));
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = ((lifted(even[i]) >> 4) & kEvenBytes) | ((lifted(odd[i]) << 4) & kOddBytes);
      const uint32_t signs = ((even[i] >> 8) & kEvenBytes) | (odd[i] & kOddBytes);
      codes[i] = kSigned ? word | (signs & (word + 0x7F7F7F7Fu) & kSignsOfBytes) : word;
    }
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
