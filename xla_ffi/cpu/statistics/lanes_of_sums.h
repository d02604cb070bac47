// Sums and counts that each lane of a vector adds up for itself, and which numbers count.
#pragma once

#include "../vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Magnitude bits; 0 for subnormal numbers and for those that are not finite.
JLP_RULE U32 finite_magnitude(F32 v) {
  const U32 bits = magnitude(v);
  return bits >= kMinNormalBits && bits < kInfinityBits ? bits : U32{};
}

/// Subnormal numbers as zeros, in memory too.
JLP_RULE F32 without_subnormals(F32 v) { return L::from_bits(magnitude(v) < kMinNormalBits ? U32{} : L::bits(v)); }

// --- which lanes: g++ makes a vector of every comparison, which AVX-512 need not have
#if defined(JLP_ISA_AVX512)
using Which = __mmask16;
JLP_RULE Which less(U32 a, U32 b) { return _mm512_cmpgt_epi32_mask(raw(b), raw(a)); }  // magnitudes lie below 2^31
JLP_RULE Which equal(U32 a, U32 b) { return _mm512_cmpeq_epi32_mask(raw(a), raw(b)); }
JLP_RULE Which is_zero(U32 v) { return _mm512_cmpeq_epi32_mask(raw(v), _mm512_setzero_si512()); }
JLP_RULE Which not_zero(U32 v) { return _mm512_test_epi32_mask(raw(v), raw(v)); }
JLP_RULE Which both(Which a, Which b) { return static_cast<Which>(a & b); }
JLP_RULE Which either(Which a, Which b) { return static_cast<Which>(a | b); }
JLP_RULE U32 one_more(U32 count, Which where) {
  return (U32)_mm512_mask_sub_epi32(raw(count), where, raw(count), _mm512_set1_epi32(-1));
}
JLP_RULE F32 keep(F32 v, Which where) { return (F32)_mm512_maskz_mov_ps(where, raw(v)); }
JLP_RULE bool any_lane(U32 v) { return not_zero(v) != 0; }
JLP_RULE bool any(Which where) { return where != 0; }
#else
using Which = U32;
JLP_RULE Which less(U32 a, U32 b) { return (U32)(a < b); }
JLP_RULE Which equal(U32 a, U32 b) { return (U32)(a == b); }
JLP_RULE Which is_zero(U32 v) { return (U32)(v == 0); }
JLP_RULE Which not_zero(U32 v) { return (U32)(v != 0); }
JLP_RULE Which both(Which a, Which b) { return a & b; }
JLP_RULE Which either(Which a, Which b) { return a | b; }
JLP_RULE U32 one_more(U32 count, Which where) { return count - where; }
JLP_RULE F32 keep(F32 v, Which where) { return L::from_bits(L::bits(v) & where); }
JLP_RULE bool any_lane(U32 v) {
#if defined(JLP_ISA_AVX2)
  return !_mm256_testz_si256(raw(v), raw(v));
#else
  typedef uint64_t Words __attribute__((vector_size(JLP_VECTOR_BYTES)));
  const Words words = (Words)v;
  return (words[0] | words[1]) != 0;
#endif
}
JLP_RULE bool any(Which where) { return any_lane(where); }
#endif

JLP_RULE uint64_t total(U32 counts) {
  uint64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += counts[i];
  return sum;
}

/// Of float32 vectors, in float64. Flat loops over memory: compilers vectorise them.
struct LanesOfSums {
  alignas(64) double lanes[kLanes] = {};

  void add(F32 v) {
    alignas(64) float of[kLanes];
    store(of, v);
    for (int i = 0; i < kLanes; ++i) lanes[i] += static_cast<double>(of[i]);
  }
  void add_squares(F32 v) {
    alignas(64) float of[kLanes];
    store(of, v);
    for (int i = 0; i < kLanes; ++i) lanes[i] += static_cast<double>(of[i]) * of[i];
  }
  double total() const {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return sum;
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
