// 4-bit codes to float32 in registers, 32 at a time, in the order of operands.h.
//
// AVX-512 looks a code up in 16 float32s. AVX2 looks up the two bytes of its 16-bit float (bfloat16 or float16, which every
// number of a 4-bit format is), 32 codes an instruction, and widens those. Portable code looks up one code at a time.
//
// A table holds the codes' numbers times their scale. Making one takes as long as unpacking 64 codes, so tables are loaded
// ready-made: there is one for each byte that a scale of E2M1 can be, and AVX2 has for a bfloat16 scale of Int4 one for each
// of its lower bytes, to which its upper byte is added.
#pragma once

#include "../../numerics/e2m1.h"
#include "../../numerics/float8.h"
#include "../../numerics/int4.h"
#include "operands.h"

namespace jaxlowprec {
namespace JLP_ISA {

#if defined(JLP_ISA_AVX2)
/// 16 bytes, in either half.
JLP_RULE __m256i load_twice(const uint8_t* p) { return _mm256_broadcastsi128_si256(load<__m128i>(p)); }
#endif

/// 0 to 15, each where a table takes its number from: in order, or for AVX2 as its packing puts them in order.
JLP_RULE void count_codes(F32 (&numbers)[kParts]) {
  for (int i = 0; i < kSums; ++i) {
    const int code = kLanes == 8 ? i % 4 + i / 4 % 2 * 8 + i / 8 * 4 : i;
    numbers[i / kLanes][i % kLanes] = static_cast<float>(code);
  }
}

template <class E>
using Int4DeployOf = std::conditional_t<std::is_same_v<E, BF16>, Int4BF16, Int4F16>;

/// What the codes 0 to 15 stand for: numbers of a 16-bit float type E.
template <class E>
class NibbleTable {
 public:
  /// Of Int4 codes in a group: steps from `zero` by `scale`, rounded once to E. A scale that is not finite gives NaN.
  JLP_RULE NibbleTable of_int4(uint16_t scale_bits, uint8_t zero) {
    const F32 scale = L::splat(int4_decode_scale<float, Int4DeployOf<E>>(scale_bits)), middle = L::splat(zero);
    F32 numbers[kParts];
    count_codes(numbers);
    for (F32& part : numbers) part = L::flush((part - middle) * scale);
    return NibbleTable(numbers);
  }
#if defined(JLP_ISA_AVX512)
  /// Whether bfloat16 scales are all zero, or normal and so small that 8 times 2^16 of them are finite.
  __attribute__((noinline)) static bool all_moderate(const uint8_t* scales, int64_t count) {
    constexpr uint16_t kLeast = 0x0080, kMost = 0x7180;
    uint16_t others = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t magnitude = load<uint16_t>(scales + 2 * i) & 0x7FFF;
      others |= static_cast<uint16_t>(magnitude - kLeast) > kMost - kLeast ? magnitude : 0;
    }
    return others == 0;
  }
  /// of_int4 with such a scale of a symmetric group, without branches: a sum with 2^16 times a number's power of two has a
  /// last bit worth that of a bfloat16, so it rounds as that does. A zero keeps its sign.
  __attribute__((always_inline)) static NibbleTable of_moderate_scale(uint16_t scale_bits) {
    F32 numbers[kParts];
    count_codes(numbers);
    const F32 scale = (F32)_mm512_set1_epi32(static_cast<int>(uint32_t{scale_bits} << 16));
    const F32 exact = (numbers[0] - static_cast<float>(kInt4Middle)) * scale;
    const F32 large = (F32)((L::bits(exact) & 0xFF800000u) + (16u << 23));
    NibbleTable table;
    table.numbers_ = (F32)(L::bits((exact + large) - large) | (L::bits(exact) & 0x80000000u));
    return table;
  }
#endif
  /// From numbers in the order of count_codes, rounded here.
  explicit NibbleTable(const F32 (&numbers)[kParts]) {
#if defined(JLP_ISA_AVX512)
    numbers_ = E::round_finite(numbers[0]);
#elif defined(JLP_ISA_AVX2)
    const __m256i low_bytes = _mm256_set1_epi16(0xFF);
    const __m256i halves = _mm256_packus_epi32(bits(numbers[0]), bits(numbers[1]));
    const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(halves, low_bytes), _mm256_srli_epi16(halves, 8));
    low_ = _mm256_permute4x64_epi64(bytes, 0b10001000), high_ = _mm256_permute4x64_epi64(bytes, 0b11011101);
#else
    for (int i = 0; i < kParts; ++i) store(numbers_ + i * kLanes, E::round_finite(numbers[i]));
#endif
  }
#if defined(JLP_ISA_AVX2)
  /// From the numbers' bytes, twice each.
  NibbleTable(__m256i low, __m256i high) : low_(low), high_(high) {}
  void store_bytes(uint8_t (&bytes)[2][16]) const {
    store(bytes[0], _mm256_castsi256_si128(low_)), store(bytes[1], _mm256_castsi256_si128(high_));
  }
#else
  /// From 16 numbers of E.
  explicit NibbleTable(const float* numbers) { memcpy(&numbers_, numbers, sizeof numbers_); }
#endif

  /// The numbers of 16 bytes of codes, those of the latter 8 bytes by `second`.
  __attribute__((always_inline)) void unpack(const NibbleTable& second, const uint8_t* codes, Sixteen (&w)[2]) const {
#if defined(JLP_ISA_AVX512)
    const __m512i shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    const NibbleTable* tables[2] = {this, &second};
    JLP_UNROLL(2)
    for (int i = 0; i < 2; ++i) {
      const __m512i words = _mm512_set1_epi64(load<int64_t>(codes + 8 * i));
      w[i].part[0] = (F32)_mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), raw(tables[i]->numbers_));
    }
#elif defined(JLP_ISA_AVX2)
    const __m256i both = load_twice(codes);
    const __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    const auto low = [&](const NibbleTable& table) { return _mm256_shuffle_epi8(table.low_, nibbles); };
    const auto high = [&](const NibbleTable& table) { return _mm256_shuffle_epi8(table.high_, nibbles); };
    widen(_mm256_unpacklo_epi8(low(*this), high(*this)), w[0]);  // k = 0, 2, ..., 14 in the lower half, odd in the upper
    widen(_mm256_unpackhi_epi8(low(second), high(second)), w[1]);
#else
    const NibbleTable* tables[2] = {this, &second};
    for (int i = 0; i < 2 * kParts; i += 2) {
      const U32 bytes = load_u8(codes + i / 2 * kLanes);
      const NibbleTable& table = *tables[i / kParts];
      table.look_up(bytes & 15u, w[i / kParts].part[i % kParts]),
          table.look_up(bytes >> 4, w[i / kParts].part[i % kParts + 1]);
    }
#endif
  }
  __attribute__((always_inline)) void unpack(const uint8_t* codes, Sixteen (&w)[2]) const { unpack(*this, codes, w); }

 private:
#if defined(JLP_ISA_AVX512)
  NibbleTable() = default;
  F32 numbers_;
#elif defined(JLP_ISA_AVX2)
  JLP_RULE __m256i bits(F32 numbers) {
    if constexpr (std::is_same_v<E, BF16>) {
      const U32 u = L::bits(numbers);  // as BF16::round_finite
      return raw((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
    }
    return _mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)numbers, _MM_FROUND_TO_NEAREST_INT));
  }
  JLP_RULE void widen(__m256i halves, Sixteen& w) {
    if constexpr (std::is_same_v<E, BF16>) {
      w = widen_words(halves);
    } else {
      const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                             0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      const __m256i places = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(halves, order), 0b11011000);
      w.part[0] = from_half(_mm256_castsi256_si128(places));
      w.part[1] = from_half(_mm256_extracti128_si256(places, 1));
    }
  }
  __m256i low_, high_;
#else
  void look_up(U32 codes, F32& numbers) const {
    for (int i = 0; i < kLanes; ++i) numbers[i] = numbers_[codes[i]];
  }
  alignas(64) float numbers_[16];
#endif
};

/// An E2M1 code times a scale of one byte, exact in bfloat16.
template <class Decode>
float scaled_e2m1(uint32_t code, uint32_t scale, Decode decode) {
  using L1 = Lanes<float>;
  return L1::flush(e2m1_decode<float>(code) * L1::flush(decode(scale)));
}

/// Tables of E2M1 codes times any scale of one byte, made once.
class E2M1Tables {
 public:
  using Operands = Numbers;

  /// Of E4M3 scales or of E8M0, powers of two.
  static const E2M1Tables& e4m3() {
    static const E2M1Tables tables([](uint32_t scale) { return float8_decode<E4M3, float>(scale); });
    return tables;
  }
  static const E2M1Tables& e8m0() {
    static const E2M1Tables tables([](uint32_t scale) { return e8m0_decode<float>(scale); });
    return tables;
  }

  /// 16 bytes of codes, the latter 8 with scale `second`.
  __attribute__((always_inline)) void unpack(uint8_t first, uint8_t second, const uint8_t* codes, Sixteen (&w)[2]) const {
    (*this)[first].unpack((*this)[second], codes, w);
  }
  __attribute__((always_inline)) void unpack(uint8_t scale, const uint8_t* codes, Sixteen (&w)[2]) const {
    (*this)[scale].unpack(codes, w);
  }

 private:
  NibbleTable<BF16> operator[](uint8_t scale) const {
#if defined(JLP_ISA_AVX2)
    return {load_twice(bytes_[scale][0]), load_twice(bytes_[scale][1])};
#else
    return NibbleTable<BF16>(numbers_[scale]);
#endif
  }

  template <class Decode>
  explicit E2M1Tables(Decode decode) {
    for (uint32_t scale = 0; scale < 256; ++scale)
      for (uint32_t code = 0; code < 16; ++code) {
        const float number = scaled_e2m1(code, scale, decode);
#if defined(JLP_ISA_AVX2)
        const uint32_t half = bf16_encode(number);  // exact
        bytes_[scale][0][code] = half & 0xFF, bytes_[scale][1][code] = half >> 8;
#else
        numbers_[scale][code] = number;
#endif
      }
  }
#if defined(JLP_ISA_AVX2)
  alignas(64) uint8_t bytes_[256][2][16];
#else
  alignas(64) float numbers_[256][16];
#endif
};

#if defined(JLP_ISA_AVX2)
/// Tables of Int4 codes times bfloat16 scales, made once: steps times a scale round alike whatever the scale's sign and the
/// upper bits of its exponent, so they are kept for each lower byte of a scale and its upper byte is added to theirs.
class Int4Tables {
 public:
  static const Int4Tables& all() {
    static const Int4Tables tables;
    return tables;
  }

  __attribute__((always_inline)) NibbleTable<BF16> table(uint16_t scale, uint8_t zero) const {
    const bool ordinary = static_cast<uint16_t>((scale & 0x7FFF) - kLeast) <= kMost - kLeast && zero < 16;
    if (__builtin_expect(!ordinary, false)) {
      uint8_t bytes[2][16];
      compute(scale, zero, bytes);
      return {load_twice(bytes[0]), load_twice(bytes[1])};
    }
    const int from = 15 - zero;
    const __m256i upper = _mm256_and_si256(_mm256_set1_epi8(static_cast<char>(scale >> 8)), load_twice(added_ + from));
    return {load_twice(rows_[scale & 0xFF].low + from), _mm256_add_epi8(load_twice(rows_[scale & 0xFF].high + from), upper)};
  }

 private:
  /// Through memory: returned as a table, it would have g++ keep the callers' tables there.
  __attribute__((noinline, cold)) static void compute(uint16_t scale, uint8_t zero, uint8_t (&bytes)[2][16]) {
    NibbleTable<BF16>::of_int4(scale, zero).store_bytes(bytes);
  }

  // Scales that are normal numbers, and so small that 15 steps are finite.
  static constexpr uint32_t kLeast = 0x0080, kMost = 0x7D7F;
  static constexpr uint32_t kUpper = 0x3F;  // the upper byte that the rows are made with

  Int4Tables() {
    for (uint32_t scale = 0; scale < 256; ++scale)
      for (int steps = -15; steps <= 15; ++steps) {
        const uint32_t half = bf16_encode(steps * bf16_decode<float>((kUpper << 8) | scale));
        rows_[scale].low[steps + 15] = half & 0xFF;
        rows_[scale].high[steps + 15] = steps == 0 ? 0 : (half >> 8) - kUpper;
      }
    memset(added_, 0xFF, sizeof added_);
    added_[15] = 0x80;  // zero takes only the sign
  }
  struct alignas(64) Row {
    uint8_t low[32], high[32];  // by steps + 15
  };
  Row rows_[256];
  uint8_t added_[31];
};
#endif

}  // namespace JLP_ISA
}  // namespace jaxlowprec
