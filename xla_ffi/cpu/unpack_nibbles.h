// 4-bit codes to float32 in registers, 32 at a time, in the order of sixteen_lanes.h.
//
// AVX-512 looks a code up in 16 float32s. AVX2 looks up the two bytes of its 16-bit float (bfloat16 or float16, which every
// number of a 4-bit format is but for a factor), 32 codes an instruction, and widens those. Portable code computes.
#pragma once

#include "../numerics/e2m1.h"
#include "sixteen_lanes.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kUnpacked = 32;  // codes that are unpacked together

/// What the codes 0 to 15 stand for: numbers, given in the order of count_codes, rounded to a 16-bit float type E.
template <class E>
class NibbleTable {
 public:
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

  /// The numbers of 16 bytes of codes.
  __attribute__((always_inline)) void unpack(const uint8_t* codes, Sixteen (&w)[2]) const {
#if defined(JLP_ISA_AVX512)
    const __m512i shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    for (int i = 0; i < 2; ++i) {
      const __m512i words = _mm512_set1_epi64(load<int64_t>(codes + 8 * i));
      w[i].part[0] = (F32)_mm512_permutexvar_ps(_mm512_srlv_epi32(words, shifts), raw(numbers_));
    }
#elif defined(JLP_ISA_AVX2)
    const __m256i both = _mm256_broadcastsi128_si256(load<__m128i>(codes));
    const __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(low_, nibbles), high = _mm256_shuffle_epi8(high_, nibbles);
    widen(_mm256_unpacklo_epi8(low, high), w[0]);  // k = 0, 2, ..., 14 in the lower half, 1, 3, ..., 15 in the upper
    widen(_mm256_unpackhi_epi8(low, high), w[1]);
#else
    for (int i = 0; i < 2 * kParts; i += 2) {
      const U32 bytes = load_u8(codes + i / 2 * kLanes);
      look_up(bytes & 15u, w[i / kParts].part[i % kParts]), look_up(bytes >> 4, w[i / kParts].part[i % kParts + 1]);
    }
#endif
  }

 private:
#if defined(JLP_ISA_AVX512)
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

/// 0 to 15, each where a table takes its number from: in order, or for AVX2 as its packing puts them in order.
JLP_RULE void count_codes(F32 (&numbers)[kParts]) {
  for (int i = 0; i < kSums; ++i) {
    const int code = kLanes == 8 ? i % 4 + i / 4 % 2 * 8 + i / 8 * 4 : i;
    numbers[i / kLanes][i % kLanes] = static_cast<float>(code);
  }
}

/// Of E2M1.
JLP_RULE NibbleTable<BF16> e2m1_table() {
  F32 numbers[kParts];
  count_codes(numbers);
  for (F32& part : numbers) part = e2m1_decode<F32>(L::truncate(part));
  return NibbleTable<BF16>(numbers);
}

/// Of Int4 codes in a group: steps from `zero` by `scale`, rounded once to E. A scale that is not finite gives NaN.
template <class E>
JLP_RULE NibbleTable<E> int4_table(float scale, float zero) {
  F32 numbers[kParts];
  count_codes(numbers);
  for (F32& part : numbers) part = L::flush((part - zero) * scale);
  return NibbleTable<E>(numbers);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
