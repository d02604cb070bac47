// 4-bit codes to pairs of bfloat16 in registers, 32 at a time, in the order of operands.h: 3 instructions where float32
// (unpack_nibbles.h) takes 4, and 9 for the 128 of a line. A code is looked up in 16 numbers that lie in a vector twice, so
// that of an index, 16 bits, the upper 12 do not count.
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

/// A line of codes: 4 times 32.
class CodeLine {
 public:
  explicit CodeLine(const uint8_t* codes)
      : bytes_((U32)_mm512_permutexvar_epi8(_mm512_load_si512(kPairOrder.line), load<__m512i>(codes))) {}

  /// As pair_indices, of the i-th 32.
  __attribute__((always_inline)) __m512i indices(int i) const {
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(kPairOrder.field[i]), raw(bytes_));
  }

 private:
  U32 bytes_;
};

/// What the codes 0 to 15 stand for.
class NibblePairTable {
 public:
  /// As NibbleTable's: with a scale that is not finite all are NaN, by one that is NaN.
  __attribute__((always_inline)) NibblePairTable(uint16_t scale, const uint8_t* zero) {
    constexpr uint16_t kInfinity = 0x7F80, kNaN = 0xFFC0;
    if ((scale & 0x7FFF) == kInfinity) scale = kNaN;
    F32 numbers[kParts];
    count_codes(numbers);
    F32 steps = numbers[0] - kInt4Middle;
    if (zero) steps = numbers[0] - L::splat(*zero);
    const F32 rounded = steps * (F32)_mm512_set1_epi32(static_cast<int>(uint32_t{scale} << 16));
    words_ = (U32)_mm512_cvtne2ps_pbh(raw(rounded), raw(rounded));
  }

  __attribute__((always_inline)) U32 pairs(__m512i indices) const {
    return (U32)_mm512_permutexvar_epi16(indices, raw(words_));
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

  /// Upper halves have scale `first`, lower ones `second`: bit 4 of an index chooses.
  __attribute__((always_inline)) U32 pairs(uint8_t first, uint8_t second, __m512i indices) const {
    const U32 chosen = ((U32)indices & 0x000F000Fu) | 0x00100000u;
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(words(second)), words(first), 1);
    return (U32)_mm512_permutexvar_epi16(raw(chosen), both);
  }
  __attribute__((always_inline)) U32 pairs(uint8_t scale, __m512i indices) const {
    return (U32)_mm512_permutexvar_epi16(indices, _mm512_broadcast_i64x4(words(scale)));
  }

 private:
  __m256i words(uint8_t scale) const { return load<__m256i>(words_[scale]); }

  template <class Decode>
  explicit E2M1PairTables(Decode decode) {
    for (uint32_t scale = 0; scale < 256; ++scale)
      for (uint32_t code = 0; code < 16; ++code) words_[scale][code] = bf16_encode(scaled_e2m1(code, scale, decode));
  }
  alignas(64) uint16_t words_[256][16];
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
