// The operands of matmul_float8.h as bfloat16 numbers, which hold every one of them exactly, two neighbours along K to a
// unit: how codes become them and how AVX512_BF16's dot product multiplies them.
//
// The first neighbour goes into the upper half, so that a chain of dot products is the chain of fused multiply-adds along K
// of the other instruction sets (bf16_pair.h).
#pragma once

#include <algorithm>

#include "../../numerics/e2m1.h"
#include "../../numerics/float8.h"
#include "../../problems.h"
#include "../vec.h"
#include "bf16_pair.h"

namespace jaxlowprec {
namespace JLP_ISA {

using Unit = uint32_t;
using UnitVector = U32;
constexpr int kPerUnit = 2;

JLP_RULE U32 splat_unit(uint32_t unit) { return U32{} + unit; }

template <bool kMayUnderflow>
JLP_RULE F32 add_products_of(U32 a, U32 b, F32 sums) {
  return add_products_of_pairs(a, b, sums);
}

/// Both numbers through `scaled(numbers, k)`, which is exact, or zero or infinity.
template <class Scaled>
JLP_RULE U32 scale_pairs(U32 pairs, Scaled scaled, int64_t k) {
  return pair(scaled(L::from_bits(pairs & 0xFFFF0000u), k), scaled(L::from_bits(pairs << 16), k));
}

/// MX scales of kLanes rows as integers that are added to the bits of finite bfloat16 numbers, except zeros. Scales must be
/// moderate, so that no exponent leaves its range.
struct ModerateScales {
  static constexpr int kBlock = 32, kBlocks = 8;
  alignas(64) uint16_t addends[kBlocks][2 * kLanes];

  /// Those of kBlocks blocks; rows of scales are `stride` bytes apart. False: some are not moderate.
  bool load_from(const uint8_t* scales, int64_t stride) {
    constexpr int kBias = 127, kMost = 100;
    const auto eight_rows = [&](const uint8_t* first) {
      int64_t row[8];
      for (int r = 0; r < 8; ++r) memcpy(&row[r], first + r * stride, kBlocks);
      return _mm512_set_epi64(row[7], row[6], row[5], row[4], row[3], row[2], row[1], row[0]);
    };
    const __m512i halves[2] = {eight_rows(scales), eight_rows(scales + 8 * stride)};
    for (const __m512i& half : halves) {
      const __m512i above = _mm512_sub_epi8(half, _mm512_set1_epi8(kBias - kMost));
      if (_mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8(static_cast<char>(2 * kMost)))) return false;
    }
    alignas(64) uint32_t index[kLanes];
    for (int i = 0; i < kLanes; ++i) index[i] = i * 0x00080008u;  // a lane's word takes the same byte twice
    __m512i at = _mm512_load_si512(index);
    for (int i = 0; i < kBlocks; ++i) {
      const __m512i exponents = _mm512_maskz_permutex2var_epi8(0x5555555555555555u, halves[0], at, halves[1]);
      const __m512i addend = _mm512_sub_epi16(_mm512_slli_epi16(exponents, 7), _mm512_set1_epi16(kBias << 7));
      _mm512_store_si512(addends[i], addend);
      at = _mm512_add_epi16(at, _mm512_set1_epi16(1));
    }
    return true;
  }
};
struct ModeratelyScaled {
  const ModerateScales& scales;
};
JLP_RULE U32 scale_pairs(U32 pairs, ModeratelyScaled scaled, int64_t k) {
  const __mmask32 some = _mm512_test_epi16_mask(raw(pairs), _mm512_set1_epi16(0x7FFF));
  const __m512i addend = _mm512_load_si512(scaled.scales.addends[k / ModerateScales::kBlock]);
  return (U32)_mm512_mask_add_epi16(raw(pairs), some, raw(pairs), addend);
}

/// bfloat16 bits by code: of 8-bit ones without the sign, the two bytes apart.
template <class Element>
struct PairTable {
  alignas(64) uint8_t low[128], high[128];

  PairTable() {
    for (uint32_t code = 0; code < 128; ++code) {
      const uint32_t bits = Lanes<float>::bits(float8_decode<Element, float>(code));
      low[code] = static_cast<uint8_t>(bits >> 16), high[code] = static_cast<uint8_t>(bits >> 24);
    }
  }
  static const PairTable& get() {
    static const PairTable table;
    return table;
  }
};
template <>
struct PairTable<E2M1> {
  alignas(64) uint16_t bits[32];  // twice the 16 codes: of an index 5 bits count

  PairTable() {
    for (uint32_t i = 0; i < 32; ++i) bits[i] = static_cast<uint16_t>(Lanes<float>::bits(e2m1_decode<float>(i % 16)) >> 16);
  }
  static const PairTable& get() {
    static const PairTable table;
    return table;
  }
};

/// The bytes of pairs whose codes lie at first(lane) and first(lane) + 1, taken from 64 low bytes and 64 high ones.
struct LanesFirst {  // lane i of a vector of words holds 4 codes: the first two
  static constexpr int at(int lane) { return 4 * lane; }
};
struct LanesSecond {
  static constexpr int at(int lane) { return 4 * lane + 2; }
};
struct RowFirst {  // 64 codes of one row: the first 32
  static constexpr int at(int lane) { return 2 * lane; }
};
struct RowSecond {
  static constexpr int at(int lane) { return 32 + 2 * lane; }
};
template <class Place>
JLP_RULE __m512i pair_bytes() {
  alignas(64) uint32_t index[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t first = Place::at(i), second = first + 1;
    index[i] = second | (64 + second) << 8 | first << 16 | (64 + first) << 24;
  }
  return _mm512_load_si512(index);
}

/// 64 8-bit codes as two vectors of pairs; `largest` is of each byte's upper half so far, without the sign.
template <class Element, class First, class Second>
JLP_RULE void decode_pairs(U32 codes, const PairTable<Element>& table, U32& first, U32& second, __m512i& largest) {
  const __m512i at = raw(codes), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), at, _mm512_load_si512(table.low + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), at, _mm512_load_si512(table.high + 64));
  largest = _mm512_max_epu8(largest, magnitude);
  const __m512i high = _mm512_or_si512(magnitude, _mm512_and_si512(at, sign));
  first = (U32)_mm512_permutex2var_epi8(low, pair_bytes<First>(), high);
  second = (U32)_mm512_permutex2var_epi8(low, pair_bytes<Second>(), high);
}

/// A pair a lane from the low byte of each: two 4-bit codes, the low nibble's first.
JLP_RULE U32 decode_nibble_pairs(U32 bytes, const PairTable<E2M1>& table) {
  const U32 index = (bytes << 16) | ((bytes >> 4) & 0xFu);
  return (U32)_mm512_permutexvar_epi16(raw(index), _mm512_load_si512(table.bits));
}

/// The codes of one row of a; `bytes` are followed by zeros up to 64 in `out`.
template <class Element, class Scaled>
__attribute__((noinline)) static void unpack_row_units(const uint8_t* data, int64_t bytes, Scaled scaled, uint32_t* out) {
  const auto& table = PairTable<Element>::get();
  constexpr int kCodes = Element::kPacked ? 2 : 1;  // in a byte
  for (int64_t at = 0; at < bytes; at += 64) {
    U32 codes = U32{};
    if (bytes - at >= 64)
      codes = load<U32>(data + at);
    else
      memcpy(&codes, data + at, bytes - at);
    U32 pairs[2 * kCodes];
    if constexpr (Element::kPacked) {
      alignas(64) uint8_t each[64];
      store(each, codes);
      for (int i = 0; i < 4; ++i) pairs[i] = decode_nibble_pairs(load_u8(each + 16 * i), table);
    } else {
      __m512i largest{};
      decode_pairs<Element, RowFirst, RowSecond>(codes, table, pairs[0], pairs[1], largest);
    }
    for (int i = 0; i < 2 * kCodes; ++i)
      store(out + at * kCodes / 2 + i * kLanes, scale_pairs(pairs[i], scaled, at * kCodes + 2 * kLanes * i));
  }
}

/// The codes of kLanes rows of b, `stride` bytes apart; those beyond `rows` are zero. Returns whether all are finite.
template <class Element, class Scaled>
__attribute__((noinline)) static bool unpack_vector_units(const uint8_t* data, int64_t stride, int64_t rows, int64_t bytes,
                                                          Scaled scaled, uint32_t* out) {
  const auto& table = PairTable<Element>::get();
  __m512i largest{};
  constexpr int kCodes = Element::kPacked ? 2 : 1;
  const auto store_word = [&](U32 word, int64_t byte) {  // of every row
    U32 pairs[2 * kCodes];
    if constexpr (Element::kPacked)
      for (int i = 0; i < 4; ++i) pairs[i] = decode_nibble_pairs(word >> (8 * i), table);
    else
      decode_pairs<Element, LanesFirst, LanesSecond>(word, table, pairs[0], pairs[1], largest);
    const int64_t k = byte * kCodes;
    for (int i = 0; i < 2 * kCodes; ++i) store(out + (k / 2 + i) * kLanes, scale_pairs(pairs[i], scaled, k + 2 * i));
  };
  int64_t at = 0;
  for (; rows == kLanes && at + 64 <= bytes; at += 64) {  // everything stays in registers
    U32 v[kLanes];
    JLP_UNROLL(16)
    for (int r = 0; r < kLanes; ++r) v[r] = load<U32>(data + r * stride + at);
    transpose(v);
    JLP_UNROLL(16)
    for (int w = 0; w < kLanes; ++w) store_word(v[w], at + 4 * w);
  }
  for (; at < bytes; at += 64) {
    const int64_t count = std::min<int64_t>(64, bytes - at);
    U32 v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      v[r] = U32{};
      if (r < rows) memcpy(&v[r], data + r * stride + at, count);
    }
    transpose(v);
    for (int w = 0; 4 * w < count; ++w) store_word(v[w], at + 4 * w);
  }
  return _mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(0x7F)) == 0;
}

/// The codes of kLanes rows of b with their MX scales, `scale_stride` bytes apart, by the faster path. Returns false if
/// that cannot be used: the scales are not moderate, or fewer than a step's, or a code is not finite.
template <class Element>
JLP_RULE bool unpack_moderate_units(const uint8_t* data, int64_t stride, int64_t bytes, const uint8_t* scales,
                                    int64_t scale_stride, int64_t blocks, uint32_t* out) {
  ModerateScales moderate;
  if (blocks != ModerateScales::kBlocks || !moderate.load_from(scales, scale_stride)) return false;
  return unpack_vector_units<Element>(data, stride, kLanes, bytes, ModeratelyScaled{moderate}, out);
}

/// A last number without a neighbour gets +0 in a and -0 in b: their product changes no sum, not even one that is -0.
JLP_RULE void end_row(int64_t depth, uint32_t* out) {
  if (depth % 2 == 1) out[depth / 2] &= 0xFFFF0000u;
}
JLP_RULE void end_vector(int64_t depth, uint32_t* out) {
  uint32_t* last = out + depth / 2 * kLanes;
  if (depth % 2 == 1) store(last, (load<U32>(last) & 0xFFFF0000u) | 0x8000u);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
