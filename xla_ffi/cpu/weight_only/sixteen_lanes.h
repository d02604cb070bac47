// Sums of products in 16 lanes, the order that weight-only GEMMs add in: lane j sums k = j, j + 16, ...; at the end j and
// j + 8 are added, then + 4, + 2, + 1. Each instruction set places lane j in its vectors where
// 4-bit codes unpack with the fewest instructions.
#pragma once

#include "../elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kSums = 16;
constexpr int kUnpacked = 2 * kSums;    // numbers that are unpacked together
constexpr int kParts = kSums / kLanes;  // vectors that hold them

struct Sixteen {
  F32 part[kParts];
};

/// The lane at place `p`, counted through the parts.
constexpr int lane_at(int p) {
#if defined(JLP_ISA_AVX512)
  return p % 2 * 8 + p / 2;  // nibble p / 2 of word p % 2
#elif defined(JLP_ISA_AVX2)
  return p % 4 * 4 + p / 4;  // see AVX2's NibbleTable
#else
  return p / 8 * 8 + p % 4 * 2 + p / 4 % 2;  // four bytes' low nibbles, then their high ones
#endif
}

/// Places in order of k. A part's lanes lie in two vectors at most.
template <int kPart>
struct Arrangement {
  static constexpr int kFirst = kParts == 1 ? 0 : kPart / 2 * 2;
  static constexpr int at(int i) { return lane_at(kPart * kLanes + i) - kFirst * kLanes; }
};
template <int... kPart>
JLP_RULE Sixteen arrange(const F32 (&v)[kParts], std::integer_sequence<int, kPart...>) {
  return {
      {shuffle<Arrangement<kPart>>(v[Arrangement<kPart>::kFirst], v[kParts == 1 ? 0 : Arrangement<kPart>::kFirst + 1])...}};
}

/// Numbers in order of k.
JLP_RULE Sixteen arrange(const F32 (&v)[kParts]) { return arrange(v, std::make_integer_sequence<int, kParts>()); }

#if defined(JLP_ISA_AVX2)
/// The lower halves of 32-bit words as bfloat16 in part 0, the upper ones in part 1.
JLP_RULE Sixteen widen_words(__m256i halves) {
  return {
      {(F32)_mm256_slli_epi32(halves, 16), (F32)_mm256_and_si256(halves, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)))}};
}

/// bfloat16 in order of k.
JLP_RULE Sixteen arrange(__m256i halves) {
  const __m256i even_then_odd = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                                 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return widen_words(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(halves, even_then_odd), 0b11011000));
}
#endif

JLP_RULE Sixteen load_sixteen(const float* p) {
  Sixteen v;
  JLP_UNROLL(4)
  for (int i = 0; i < kParts; ++i) v.part[i] = load<F32>(p + i * kLanes);
  return v;
}

JLP_RULE void store_sixteen(float* p, const Sixteen& v) {
  JLP_UNROLL(4)
  for (int i = 0; i < kParts; ++i) store(p + i * kLanes, v.part[i]);
}

/// g++ otherwise makes a load of every use as an operand: more than the processor has ports for.
template <class V>
JLP_RULE void keep_in_register([[maybe_unused]] V& v) {
#if (defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)) && !defined(JLP_EMULATE_AVX512)
  asm("" : "+v"(v));
#endif
}

/// sums += x * w, each product and addition rounded once.
JLP_RULE void add_products(Sixteen& sums, const Sixteen& x, const Sixteen& w) {
  JLP_UNROLL(4)
  for (int i = 0; i < kParts; ++i) sums.part[i] = L::fused_multiply_add(x.part[i], w.part[i], sums.part[i]);
}

template <int kDistance>
JLP_RULE F32 add_neighbours(F32 v) {
  return v + shuffle<SwapLanes<kDistance>>(v, v);
}

/// The tree of additions.
JLP_RULE float total(const Sixteen& sums) {
#if defined(JLP_ISA_AVX512)
  return add_neighbours<2>(add_neighbours<4>(add_neighbours<8>(add_neighbours<1>(sums.part[0]))))[0];
#elif defined(JLP_ISA_AVX2)
  const F32 low = add_neighbours<1>(add_neighbours<2>(sums.part[0]));
  const F32 high = add_neighbours<1>(add_neighbours<2>(sums.part[1]));
  return add_neighbours<4>(low + high)[0];
#else
  const F32 even = sums.part[0] + sums.part[2], odd = sums.part[1] + sums.part[3];
  return (add_neighbours<1>(add_neighbours<2>(even)) + add_neighbours<1>(add_neighbours<2>(odd)))[0];
#endif
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
