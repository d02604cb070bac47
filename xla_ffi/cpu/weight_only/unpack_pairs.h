// 4-bit codes to pairs of bfloat16 in registers, 32 at a time, in the order of operands.h: 3 instructions where float32
// (unpack_nibbles.h) takes 4. A code is looked up in 16 numbers that lie in a vector twice, so that of an index, 16 bits,
// the upper 12 do not count.
#pragma once

#include "../matmul/matmul_pairs.h"
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
class NibblePairTable {
 public:
  /// As NibbleTable's: scale * 0 is NaN if the scale is not finite, else a zero that changes no product.
  JLP_RULE NibblePairTable of_int4(uint16_t scale_bits, uint8_t zero) {
    const F32 scale = (F32)(raw_words(scale_bits) & 0xFFFF0000u);
    F32 numbers[kParts];
    count_codes(numbers);
    const F32 steps = numbers[0] - L::splat(zero), rounded = L::fused_multiply_add(steps, scale, scale * 0.0f);
    NibblePairTable table;
    table.words_ = (U32)_mm512_cvtne2ps_pbh(raw(rounded), raw(rounded));
    return table;
  }

  __attribute__((always_inline)) void unpack(const uint8_t* codes, U32& pairs) const {
    pairs = (U32)_mm512_permutexvar_epi16(pair_indices(codes), raw(words_));
  }

 private:
  JLP_RULE U32 raw_words(uint16_t word) { return (U32)_mm512_set1_epi16(static_cast<int16_t>(word)); }

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

/// 32 8-bit codes.
template <class Element>
JLP_RULE U32 decode_pairs(const uint8_t* codes, const PairTable<Element>& table) {
  constexpr __mmask64 kUpperBytes = 0xAAAAAAAAAAAAAAAA;
  const __m512i both = _mm512_broadcast_i64x4(load<__m256i>(codes));
  const __m512i at = _mm512_permutexvar_epi8(_mm512_load_si512(kPairOrder.code), both);
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), at, _mm512_load_si512(table.low + 64));
  const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), at, _mm512_load_si512(table.high + 64));
  const U32 signs = (U32)at & 0x80008000u;
  return (U32)_mm512_mask_blend_epi8(kUpperBytes, low, high) | signs;
}

/// Numbers times 2^exponent, which is so moderate that no number leaves its range.
JLP_RULE U32 scale_pairs(U32 pairs, int32_t exponent) {
  const __m512i addend = _mm512_set1_epi16(static_cast<int16_t>(exponent * 128)), bits = raw(pairs);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF));
  const __mmask32 scaled =  // neither zero nor infinite nor NaN
      _mm512_cmple_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7F7E));
  return (U32)_mm512_mask_add_epi16(bits, scaled, bits, addend);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
