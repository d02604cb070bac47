// Instructions that SIMDe lacks, for tests of AVX-512's kernels on a processor without it: conversions, most of them two of
// 256 bits each; and the dot product of bfloat16, which it has, but with the lower half first and no fused multiply-add.
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

/// Two vectors of numbers, subnormals being zero, as bfloat16, the second one's first.
inline simde__m512i emulated_cvtne2ps_pbh(simde__m512 second, simde__m512 first) {
  uint32_t bits[32];
  memcpy(bits, &first, sizeof first), memcpy(bits + 16, &second, sizeof second);
  uint16_t halves[32];
  for (int i = 0; i < 32; ++i) {
    const uint32_t u = bits[i], magnitude = u & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u)
      halves[i] = u >> 16 | 0x40;
    else
      halves[i] = (magnitude < 0x00800000u ? u & 0x80000000u : u + 0x7FFFu + (u >> 16 & 1)) >> 16;
  }
  simde__m512i result;
  memcpy(&result, halves, sizeof halves);
  return result;
}

/// The upper halves' product first. Subnormals are zero as long as the kernels run, as the instruction has them.
inline simde__m512 emulated_dpbf16_ps(simde__m512 sums, simde__m512i a, simde__m512i b) {
  float sum[16];
  uint32_t x[16], y[16];
  memcpy(sum, &sums, sizeof sum), memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y);
  for (int i = 0; i < 16; ++i)
    for (const int shift : {0, 16}) {
      const uint32_t bits[2] = {x[i] << shift & 0xFFFF0000u, y[i] << shift & 0xFFFF0000u};
      float number[2];
      memcpy(number, bits, sizeof number);
      sum[i] = __builtin_fmaf(number[0], number[1], sum[i]);
    }
  simde__m512 result;
  memcpy(&result, sum, sizeof result);
  return result;
}

}  // namespace jaxlowprec

#define __m512bh simde__m512i
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps jaxlowprec::emulated_dpbf16_ps
#define _mm512_cvtne2ps_pbh jaxlowprec::emulated_cvtne2ps_pbh
#define _mm512_cvtepu8_epi32 jaxlowprec::emulated_cvtepu8_epi32
#define _mm512_cvtepu16_epi32 jaxlowprec::emulated_cvtepu16_epi32
#define _mm512_cvtph_ps jaxlowprec::emulated_cvtph_ps
#undef _mm512_cvtps_ph  // without optimisation it is a macro
#define _mm512_cvtps_ph jaxlowprec::emulated_cvtps_ph
