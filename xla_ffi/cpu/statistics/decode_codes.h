// Codes to numbers, one a lane.
#pragma once

#include "../../numerics/nvfp4.h"
#include "lanes_of_sums.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The same numbers as e2m1_decode.
JLP_RULE F32 e2m1_values(U32 code) {
#if defined(JLP_ISA_AVX512)
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return (F32)_mm512_permutexvar_ps(raw(code), values);
#else
  return e2m1_decode<F32>(code);
#endif
}

#if defined(JLP_HAVE_HALF_CONVERSION)
/// Of kLanes codes: the float16 that have the sign, exponent and mantissa of each.
template <class Element>
JLP_RULE F32 from_half_of_same_bits(const uint8_t* codes) {
  constexpr int kShift = 10 - Element::kMantissaBits;
  constexpr int16_t kMask = static_cast<int16_t>(0x8000 | 0x7F << kShift);
#if defined(JLP_ISA_AVX512)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(codes)), kShift);
  return from_half(_mm256_and_si256(wide, _mm256_set1_epi16(kMask)));
#else
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(eight), kShift);
  return from_half(_mm_and_si128(wide, _mm_set1_epi16(kMask)));
#endif
}
#endif

/// What decodes codes by scales, one or one a lane. `plain` is the same where no result is infinite or NaN.
template <bool kTwoLevel>
struct DecodeE2M1 {
  static constexpr uint32_t kLargest = E2M1::kLargestCode, kMagnitude = 7;
  float amax;
  template <class Scale>
  F32 operator()(U32 code, Scale scale) const {
    const F32 relative = e2m1_values(code) * scale;
    return kTwoLevel ? nvfp4_value(relative, amax) : L::flush(relative);
  }
  F32 plain(const uint8_t* codes, float scale) const { return (*this)(load_u8(codes), scale); }
  bool any_nan(const uint8_t*, int) const { return false; }
};

template <class Element>
struct DecodeFloat8 {
  static constexpr uint32_t kLargest = Element::kLargestCode, kMagnitude = 0x7F;
  template <class Scale>
  F32 operator()(U32 code, Scale scale) const {
    return L::flush(float8_decode<Element, F32>(code) * scale);
  }
  F32 plain(const uint8_t* codes, float scale) const {
#if defined(JLP_HAVE_HALF_CONVERSION)
    constexpr float kUnit = detail::two_to(15 - Element::kBias);  // float16 of the same exponent and mantissa bits
    return from_half_of_same_bits<Element>(codes) * (scale * kUnit);
#else
    return (*this)(load_u8(codes), scale);
#endif
  }
  /// Whether a code is NaN that `plain` takes for a number; count: of whole vectors.
  bool any_nan(const uint8_t* codes, int count) const {
    U8 found = U8{};
    for (int i = 0; Element::kSpecial == Special::kNaN && i < count; i += static_cast<int>(sizeof found))
      found |= (U8)((load<U8>(codes + i) & kFloat8NaN) == kFloat8NaN);
    return any_lane((U32)found);
  }
};

/// Calls visit with what decodes the format's codes.
template <class Visit>
void with_decoder(const Format& f, const float* amax, Visit visit) {
  if (!f.packed()) return with_float8(f.code, [&](auto element) { visit(DecodeFloat8<decltype(element)>{}); });
  if (amax) return visit(DecodeE2M1<true>{*amax});
  visit(DecodeE2M1<false>{0});
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
