// Conversions of AVX-512 that SIMDe lacks, for tests of its kernels on a processor without it: two of 256 bits each.
#pragma once

#include <cstring>

namespace jaxlowprec {

template <class Half, class Whole>
inline Whole join_halves(Half low, Half high) {
  Whole whole;
  memcpy(&whole, &low, sizeof low);
  memcpy(reinterpret_cast<char*>(&whole) + sizeof low, &high, sizeof high);
  return whole;
}

inline simde__m512i emulated_cvtepu8_epi32(__m128i bytes) {
  const __m256i low = _mm256_cvtepu8_epi32(bytes), high = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
  return join_halves<__m256i, simde__m512i>(low, high);
}
inline simde__m512i emulated_cvtepu16_epi32(__m256i shorts) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(shorts));
  return join_halves<__m256i, simde__m512i>(low, _mm256_cvtepu16_epi32(_mm256_extracti128_si256(shorts, 1)));
}
inline simde__m512 emulated_cvtph_ps(__m256i halves) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  return join_halves<__m256, simde__m512>(low, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

inline __m256i emulated_cvtps_ph(simde__m512 values, int) {
  __m256 halves[2];
  memcpy(halves, &values, sizeof halves);
  return join_halves<__m128i, __m256i>(_mm256_cvtps_ph(halves[0], 0), _mm256_cvtps_ph(halves[1], 0));
}

}  // namespace jaxlowprec

#define _mm512_cvtepu8_epi32 jaxlowprec::emulated_cvtepu8_epi32
#define _mm512_cvtepu16_epi32 jaxlowprec::emulated_cvtepu16_epi32
#define _mm512_cvtph_ps jaxlowprec::emulated_cvtph_ps
#undef _mm512_cvtps_ph  // without optimisation it is a macro
#define _mm512_cvtps_ph jaxlowprec::emulated_cvtps_ph
