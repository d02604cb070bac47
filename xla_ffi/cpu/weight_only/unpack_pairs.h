// 4-bit codes to pairs of bfloat16 in registers, 32 at a time, in the order of operands.h: 3 instructions where float32
// (unpack_nibbles.h) takes 4. A code is looked up in 16 numbers that lie in a vector twice, so that of an index, 16 bits,
// the upper 12 do not count.
#pragma once

#include "unpack_nibbles.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// 16 bytes of codes as indices: above a code's 4 bits its neighbours'.
JLP_RULE __m512i pair_indices(const uint8_t* codes) {
  const __m512i both = _mm512_broadcast_i32x4(load<__m128i>(codes));
  return _mm512_srlv_epi16(_mm512_shuffle_epi8(both, _mm512_load_si512(kPairOrder.byte)),
                           _mm512_load_si512(kPairOrder.shift));
}

/// What the codes 0 to 15 stand for.
class PairTable {
 public:
  /// From numbers in order, rounded here.
  explicit PairTable(const F32 (&numbers)[kParts]) : words_((U32)_mm512_cvtne2ps_pbh(raw(numbers[0]), raw(numbers[0]))) {}

  __attribute__((always_inline)) void unpack(const uint8_t* codes, U32& pairs) const {
    pairs = (U32)_mm512_permutexvar_epi16(pair_indices(codes), raw(words_));
  }

 private:
  U32 words_;
};

/// E2M1Tables for pairs.
class E2M1PairTables {
 public:
  using Operands = Pairs;

  static const E2M1PairTables& e4m3() {
    static const E2M1PairTables tables([](uint32_t scale) { return float8_decode<E4M3, float>(scale); });
    return tables;
  }
  static const E2M1PairTables& e8m0() {
    static const E2M1PairTables tables([](uint32_t scale) { return e8m0_decode<float>(scale); });
    return tables;
  }

  /// 16 bytes of codes, the latter 8 with scale `second`.
  __attribute__((always_inline)) void unpack(uint8_t first, uint8_t second, const uint8_t* codes, U32& pairs) const {
    const __m512i indices = pair_indices(codes), of_second = _mm512_permutexvar_epi16(indices, words(second));
    pairs = (U32)_mm512_mask_permutexvar_epi16(of_second, kUpperHalves, indices, words(first));
  }
  __attribute__((always_inline)) void unpack(uint8_t scale, const uint8_t* codes, U32& pairs) const {
    pairs = (U32)_mm512_permutexvar_epi16(pair_indices(codes), words(scale));
  }

 private:
  static constexpr __mmask32 kUpperHalves = 0xAAAAAAAA;

  __m512i words(uint8_t scale) const { return _mm512_load_si512(words_[scale]); }

  template <class Decode>
  explicit E2M1PairTables(Decode decode) {
    for (uint32_t scale = 0; scale < 256; ++scale)
      for (uint32_t i = 0; i < kUnpacked; ++i) words_[scale][i] = bf16_encode(scaled_e2m1(i % 16, scale, decode));
  }
  alignas(64) uint16_t words_[256][kUnpacked];
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
