// 8-bit codes to float32 by way of float16, where the processor converts that: E5M2 is a float16's upper byte, and E4M3,
// which has an exponent bit fewer, becomes 2^-8 of its value by a shift. Float16 has no NaN where E4M3 has it, so that its
// callers are told when there is one.
#pragma once

#include "../numerics/float8.h"
#include "../problems.h"
#include "vec.h"

#if defined(JLP_HAVE_HALF_CONVERSION)

namespace jaxlowprec {
namespace JLP_ISA {

/// 16 codes seen so far for NaN.
struct NaNCodes {
  Bytes16 seen = Bytes16{};

  __attribute__((always_inline)) void look(Bytes16 codes) { seen |= (Bytes16)((codes & 0x7F) == 0x7F); }
  __attribute__((always_inline)) bool any() const { return _mm_movemask_epi8((__m128i)seen) != 0; }
};

/// kLanes codes, the first or the last of 16 where that is 8, as numbers.
template <CodeType kCode, bool kLast>
JLP_RULE F32 numbers_of(Bytes16 codes) {
  const auto halves = [](Bytes16 upper) {  // codes in the upper bytes of 16-bit lanes
    if (kCode == CodeType::kE5M2) return (__m128i)upper;
    return _mm_and_si128(_mm_srai_epi16((__m128i)upper, 1), _mm_set1_epi16(static_cast<int16_t>(0xBF80)));
  };
  const float unit = kCode == CodeType::kE5M2 ? 1.0f : 256.0f;
#if defined(JLP_ISA_AVX512)
  const __m128i low = halves(interleave_low_bytes(Bytes16{}, codes)), high = halves(interleave_high_bytes(Bytes16{}, codes));
  return from_half(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1)) * unit;
#else
  return from_half(halves(kLast ? interleave_high_bytes(Bytes16{}, codes) : interleave_low_bytes(Bytes16{}, codes))) * unit;
#endif
}

/// 16 codes as 16 numbers, through `scaled`.
template <CodeType kCode, class Scaled>
JLP_RULE void store_numbers(Bytes16 codes, Scaled scaled, float* out) {
  store(out, scaled(numbers_of<kCode, false>(codes)));
  if (kLanes == 8) store(out + 8, scaled(numbers_of<kCode, true>(codes)));
}

/// 16 codes of kLanes rows as [16][kLanes] numbers.
template <CodeType kCode, class Scaled>
JLP_RULE void store_numbers_transposed(Bytes16 (&rows)[kLanes], Scaled scaled, float* out) {
  transpose(rows);
  JLP_UNROLL(16)
  for (int i = 0; i < kLanes; ++i) store_numbers<kCode>(rows[i], scaled, out + 16 * i);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec

#endif
