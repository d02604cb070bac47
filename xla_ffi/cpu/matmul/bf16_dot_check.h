// Whether a dot product of pairs of bfloat16 is two fused multiply-adds in float32: sums + upper * upper, then + lower *
// lower, each rounded to nearest even, subnormals being zero throughout.
//
// Intel documents AVX512_BF16's so, and AMD's Zen 5 was found to give just those bytes. GEMMs promise the same bytes on
// every processor, so each one is asked before it is used, where orders, roundings and flushes that differ would show.
#pragma once

#include "../vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Numbers to multiply and add: exponents are float32's fields, `count` of them from `least` on.
struct DotCase {
  uint32_t factor_least, factor_count, factor_fraction;  // bits of fraction, at most 7
  uint32_t sum_least, sum_count;
};
constexpr DotCase kDotCases[] = {{118, 16, 7, 112, 32},  // ordinary
                                 {115, 4, 2, 127, 1},    // products of about half the sum's last place, where ties are
                                 {60, 8, 7, 1, 4},       // sums next to the least normal number
                                 {30, 45, 3, 1, 1},      // sums of that number, products that underflow
                                 {186, 6, 7, 250, 5}};   // next to overflow
constexpr int kDotRounds = 256;

struct DotRandom {
  U32 state;

  DotRandom() {
    for (int i = 0; i < kLanes; ++i) state[i] = 0x01000193u * (i + 1);
  }
  U32 operator()() {
    state = state * 0x9E3779B1u + 0x7F4A7C15u;
    const U32 mixed = (state ^ (state >> 15)) * 0x85EBCA6Bu;
    return mixed ^ (mixed >> 13);
  }
  U32 number(uint32_t least, uint32_t count, uint32_t fraction_bits) {
    const U32 exponent = least + ((*this)() >> 16) * count / 0x10000u, random = (*this)();
    const U32 fraction = (random & 0x7FFFFFu) >> (23 - fraction_bits) << (23 - fraction_bits);
    return (random & kSignBit) | (exponent << 23) | fraction;
  }
};

/// `dot(a, b, sums)` takes pairs as U32 and sums as F32.
template <class Dot>
bool dot_is_two_fused_multiply_adds(Dot dot) {
  const FlushDenormals flush;
  DotRandom random;
  for (const DotCase& c : kDotCases)
    for (int round = 0; round < kDotRounds; ++round) {
      F32 a[2], b[2];
      for (F32* factors : {a, b})
        for (int i = 0; i < 2; ++i)
          factors[i] = L::from_bits(random.number(c.factor_least, c.factor_count, c.factor_fraction));
      F32 sum = L::from_bits(random.number(c.sum_least, c.sum_count, round % 2 ? 23 : 0));
      if (round % 4 == 3) sum = L::from_bits(L::bits(a[0] * b[0]) ^ (kSignBit | (random() & 3u)));  // nearly all cancels
      const F32 first = L::flush(L::fused_multiply_add(a[0], b[0], sum));
      const F32 expected = L::flush(L::fused_multiply_add(a[1], b[1], first));
      const F32 found = dot(L::bits(a[0]) | (L::bits(a[1]) >> 16), L::bits(b[0]) | (L::bits(b[1]) >> 16), sum);
      const U32 x = L::bits(found), y = L::bits(expected);
      for (int i = 0; i < kLanes; ++i) {
        const bool nan = (x[i] & kMagnitudeBits) > kInfinityBits && (y[i] & kMagnitudeBits) > kInfinityBits;
        if (x[i] != y[i] && !nan) return false;
      }
    }
  return true;
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
