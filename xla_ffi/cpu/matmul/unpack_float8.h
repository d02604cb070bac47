// 8-bit codes to float32 by way of float16, where the processor converts that: E5M2 is a float16's upper byte. A type with
// fewer exponent bits is shifted to float16's places and is then too small by a power of two, which a multiplication puts
// right: E4M3 by 2^8. Its NaN and infinity would become numbers, so that callers are told when there is one.
#pragma once

#include "../../numerics/float8.h"
#include "../../problems.h"
#include "../vec.h"

#if defined(JLP_HAVE_HALF_CONVERSION)

namespace jaxlowprec {
namespace JLP_ISA {

/// Whether any code so far was NaN or infinity that numbers_of would take for a number.
template <class Element>
struct SpecialCodes {
  Bytes16 seen = Bytes16{};

  __attribute__((always_inline)) void look(Bytes16 codes) {
    if constexpr (Element::kSpecial == Special::kInfinityAndNaN)
      seen |= (Bytes16)((codes & 0x7F) >= Element::kInfinityCode);
    else
      seen |= (Bytes16)((codes & 0x7F) == 0x7F);
  }
  __attribute__((always_inline)) bool any() const {
    return !Element::kUpperByteOfFloat16 && _mm_movemask_epi8((__m128i)seen) != 0;
  }
};

/// kLanes codes, the first or the last of 16 where that is 8, as numbers.
template <class Element, bool kLast>
JLP_RULE F32 numbers_of(Bytes16 codes) {
  constexpr int kFloat16MantissaBits = 10, kFloat16Bias = 15;
  constexpr int kShift = Element::kMantissaBits + 8 - kFloat16MantissaBits;  // of a code in the upper byte
  static_assert(kShift >= 0, "float16 must have the type's exponents");
  const auto halves = [](Bytes16 upper) {  // codes in the upper bytes of 16-bit lanes
    if (kShift == 0) return (__m128i)upper;
    return _mm_and_si128(_mm_srai_epi16((__m128i)upper, kShift),
                         _mm_set1_epi16(static_cast<int16_t>(0x8000 | 0x7F00 >> kShift)));
  };
  constexpr float unit = detail::two_to(kFloat16Bias - Element::kBias);
#if defined(JLP_ISA_AVX512)
  const __m128i low = halves(interleave_low_bytes(Bytes16{}, codes)), high = halves(interleave_high_bytes(Bytes16{}, codes));
  return from_half(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1)) * unit;
#else
  return from_half(halves(kLast ? interleave_high_bytes(Bytes16{}, codes) : interleave_low_bytes(Bytes16{}, codes))) * unit;
#endif
}

/// 16 codes as 16 numbers, through `scaled`.
template <class Element, class Scaled>
JLP_RULE void store_numbers(Bytes16 codes, Scaled scaled, float* out) {
  store(out, scaled(numbers_of<Element, false>(codes)));
  if (kLanes == 8) store(out + 8, scaled(numbers_of<Element, true>(codes)));
}

/// 16 codes of kLanes rows as [16][kLanes] numbers.
template <class Element, class Scaled>
JLP_RULE void store_numbers_transposed(Bytes16 (&rows)[kLanes], Scaled scaled, float* out) {
  transpose(rows);
  JLP_UNROLL(16)
  for (int i = 0; i < kLanes; ++i) store_numbers<Element>(rows[i], scaled, out + 16 * i);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec

#endif
