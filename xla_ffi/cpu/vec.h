// Vectors of the instruction set's native width, and the few operations on them that plain operators do not express.
//
// A kernel is written once against this file and compiled once per instruction set. Operators, comparisons and ?: are the
// compilers' own vector extensions (g++ and clang); an operation is written per instruction set only if it needs a
// particular instruction.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../numerics/lanes.h"
#include "flush_denormals.h"

#if defined(JLP_ISA_AVX512_BF16)  // AVX-512 and more
#define JLP_ISA_AVX512
#define JLP_ISA avx512_bf16
#define JLP_VECTOR_BYTES 64
#elif defined(JLP_ISA_AVX512_AMX)
#define JLP_ISA_AVX512
#define JLP_ISA avx512_amx
#define JLP_VECTOR_BYTES 64
#elif defined(JLP_ISA_AVX512)
#define JLP_ISA avx512
#define JLP_VECTOR_BYTES 64
#elif defined(JLP_ISA_AVX2)
#define JLP_ISA avx2
#define JLP_VECTOR_BYTES 32
#else
#define JLP_ISA portable
#define JLP_VECTOR_BYTES 16
#endif

#if defined(JLP_EMULATE_AVX512)  // tests: the AVX-512 kernels on a processor without it
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include "emulated_conversions.h"
#elif defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>  // immintrin.h takes half a second to compile
#endif

namespace jaxlowprec {
namespace JLP_ISA {

typedef float F32 __attribute__((vector_size(JLP_VECTOR_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(JLP_VECTOR_BYTES)));
typedef int32_t I32 __attribute__((vector_size(JLP_VECTOR_BYTES)));
typedef int16_t I16 __attribute__((vector_size(JLP_VECTOR_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(JLP_VECTOR_BYTES)));
typedef uint8_t U8 __attribute__((vector_size(JLP_VECTOR_BYTES)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));  // of every instruction set
typedef uint8_t QuarterU8 __attribute__((vector_size(JLP_VECTOR_BYTES / 4)));
typedef uint16_t HalfU16 __attribute__((vector_size(JLP_VECTOR_BYTES / 2)));  // as many lanes as U32

constexpr int kLanes = JLP_VECTOR_BYTES / 4;

#if defined(JLP_ISA_AVX512)
JLP_RULE __m512i raw(U32 v) { return (__m512i)v; }
JLP_RULE __m512 raw(F32 v) { return (__m512)v; }
#elif defined(JLP_ISA_AVX2)
JLP_RULE __m256i raw(U32 v) { return (__m256i)v; }
JLP_RULE __m256 raw(F32 v) { return (__m256)v; }
#elif defined(__SSE2__)
JLP_RULE __m128i raw(U32 v) { return (__m128i)v; }
JLP_RULE __m128 raw(F32 v) { return (__m128)v; }
#endif

}  // namespace JLP_ISA

template <>
struct Lanes<JLP_ISA::F32> {
  using F = JLP_ISA::F32;
  using Uint = JLP_ISA::U32;

  JLP_RULE Uint bits(F x) { return (Uint)x; }
  JLP_RULE F from_bits(Uint u) { return (F)u; }
  JLP_RULE F splat(float x) { return x - F{}; }  // x + 0 would not fold: it turns -0 into +0
  JLP_RULE F round_to_even(F x) { return (x + 12582912.0f) - 12582912.0f; }
  JLP_RULE Uint truncate(F x) { return (Uint) __builtin_convertvector(x, JLP_ISA::I32); }
  JLP_RULE F to_float(Uint u) { return __builtin_convertvector((JLP_ISA::I32)u, F); }
  JLP_RULE F flush(F x) {
    if (kHardwareFlushes) return x;
    const Uint u = bits(x);
    return from_bits((u & kMagnitudeBits) < kMinNormalBits ? u & kSignBit : u);
  }

#if defined(JLP_ISA_AVX512)
  JLP_RULE F min(F a, F b) { return (F)_mm512_min_ps(JLP_ISA::raw(a), JLP_ISA::raw(b)); }
  JLP_RULE F max(F a, F b) { return (F)_mm512_max_ps(JLP_ISA::raw(a), JLP_ISA::raw(b)); }
  JLP_RULE F multiply_add_exact(F a, F b, F c) {
    return (F)_mm512_fmadd_ps(JLP_ISA::raw(a), JLP_ISA::raw(b), JLP_ISA::raw(c));
  }
  JLP_RULE F fused_multiply_add(F a, F b, F c) { return multiply_add_exact(a, b, c); }
  JLP_RULE F fused_multiply_add_short(F a, F b, F c) { return multiply_add_exact(a, b, c); }
  JLP_RULE F scaled(F x, F y) { return multiply_add_exact(x, y, F{}); }  // + 0 is only seen by a product that is exactly 0
  JLP_RULE F root(F x) { return (F)_mm512_sqrt_ps(JLP_ISA::raw(x)); }
  JLP_RULE void multiply_wide(Uint a, uint32_t b, Uint& high, Uint& low) {
    const __m512i m = _mm512_set1_epi32(static_cast<int>(b)), v = JLP_ISA::raw(a);
    const __m512i even = _mm512_mul_epu32(v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), m);
    high = (Uint)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    low = a * b;
  }
#elif defined(JLP_ISA_AVX2)
  JLP_RULE F min(F a, F b) { return (F)_mm256_min_ps(JLP_ISA::raw(a), JLP_ISA::raw(b)); }
  JLP_RULE F max(F a, F b) { return (F)_mm256_max_ps(JLP_ISA::raw(a), JLP_ISA::raw(b)); }
  JLP_RULE F multiply_add_exact(F a, F b, F c) {
    return (F)_mm256_fmadd_ps(JLP_ISA::raw(a), JLP_ISA::raw(b), JLP_ISA::raw(c));
  }
  JLP_RULE F fused_multiply_add(F a, F b, F c) { return multiply_add_exact(a, b, c); }
  JLP_RULE F fused_multiply_add_short(F a, F b, F c) { return multiply_add_exact(a, b, c); }
  JLP_RULE F scaled(F x, F y) { return multiply_add_exact(x, y, F{}); }  // + 0 is only seen by a product that is exactly 0
  JLP_RULE F root(F x) { return (F)_mm256_sqrt_ps(JLP_ISA::raw(x)); }
  JLP_RULE void multiply_wide(Uint a, uint32_t b, Uint& high, Uint& low) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(b)), v = JLP_ISA::raw(a);
    const __m256i even = _mm256_mul_epu32(v, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), m);
    high = (Uint)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = a * b;
  }
#else
  JLP_RULE F min(F a, F b) { return a < b ? a : b; }
  JLP_RULE F max(F a, F b) { return a > b ? a : b; }
  JLP_RULE F multiply_add_exact(F a, F b, F c) { return a * b + c; }
  /// a * b + c rounded once, where a rule says fma: one call a lane where the processor is not known to have it.
  JLP_RULE F fused_multiply_add(F a, F b, F c) {
    for (int i = 0; i < JLP_ISA::kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
  }
  /// The same where a * b has no more than 8 significant bits: float64 holds the sum, or so much of it that the rest is too
  /// far away from any two float32s' middle to matter.
  JLP_RULE F fused_multiply_add_short(F a, F b, F c) {
#if defined(__FP_FAST_FMAF)
    return fused_multiply_add(a, b, c);
#else
    typedef double Wide __attribute__((vector_size(2 * JLP_VECTOR_BYTES)));
    const auto wide = [](F x) { return __builtin_convertvector(x, Wide); };
    return __builtin_convertvector(wide(a) * wide(b) + wide(c), F);
#endif
  }
  JLP_RULE F scaled(F x, F y) { return (flush(x) + 0.0f) * y; }
  JLP_RULE F root(F x) {
#if defined(__SSE2__)
    return (F)_mm_sqrt_ps(JLP_ISA::raw(x));
#else
    for (int i = 0; i < JLP_ISA::kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
  }
  JLP_RULE void multiply_wide(Uint a, uint32_t b, Uint& high, Uint& low) {
    for (int i = 0; i < JLP_ISA::kLanes; ++i) {
      const uint64_t product = static_cast<uint64_t>(a[i]) * b;
      high[i] = static_cast<uint32_t>(product >> 32);
      low[i] = static_cast<uint32_t>(product);
    }
  }
#endif
};

namespace JLP_ISA {

using L = Lanes<F32>;

template <class V, class T>
JLP_RULE V load(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
JLP_RULE void store(T* p, V v) {
  memcpy(p, &v, sizeof v);
}

/// A vector past the caches, to an aligned place that will not be read soon.
JLP_RULE void stream(uint8_t* to, U8 v) {
#if defined(JLP_ISA_AVX512) && !defined(JLP_EMULATE_AVX512)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
#elif defined(JLP_ISA_AVX2)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)v);
#elif defined(__SSE2__) && !defined(JLP_ISA_AVX512)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)v);
#else
  store(to, v);
#endif
}

/// A piece of a line of the result: past the caches where it is whole cache lines.
JLP_RULE void store_line(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0)
    for (int64_t at = 0; at < bytes; at += JLP_VECTOR_BYTES) stream(to + at, load<U8>(from + at));
  else
    memcpy(to, from, bytes);
}

// --- shuffles: lane i of the result is lane Pattern::at(i) of a, or of b counted on from a's end

#if defined(__clang__) || __GNUC__ >= 12
#define JLP_SHUFFLE(Indices, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JLP_SHUFFLE(Indices, a, b, ...) __builtin_shuffle(a, b, Indices{__VA_ARGS__})
#endif

template <class Pattern, class V, int... I>
JLP_RULE V shuffle_lanes(V a, V b, std::integer_sequence<int, I...>) {
  return JLP_SHUFFLE(I32, a, b, Pattern::at(I)...);
}
template <class Pattern, class V>
JLP_RULE V shuffle(V a, V b) {
  return shuffle_lanes<Pattern>(a, b, std::make_integer_sequence<int, kLanes>());
}

template <class Pattern, int... I>
JLP_RULE U8 shuffle_bytes(U8 a, U8 b, std::integer_sequence<int, I...>) {
  return JLP_SHUFFLE(U8, a, b, Pattern::at(I)...);
}
/// The same of bytes.
template <class Pattern>
JLP_RULE U8 shuffle_bytes(U8 a, U8 b) {
  return shuffle_bytes<Pattern>(a, b, std::make_integer_sequence<int, JLP_VECTOR_BYTES>());
}

struct EvenLanes {
  static constexpr int at(int i) { return 2 * i; }
};
struct OddLanes {
  static constexpr int at(int i) { return 2 * i + 1; }
};
struct InterleaveLow {
  static constexpr int at(int i) { return i / 2 + (i % 2) * kLanes; }
};
struct InterleaveHigh {
  static constexpr int at(int i) { return kLanes / 2 + InterleaveLow::at(i); }
};
// The same of 64-bit words.
constexpr int kWords = kLanes / 2;
struct InterleaveLowWords {
  static constexpr int at(int i) { return 2 * (i / 4 + (i / 2) % 2 * kWords) + i % 2; }
};
struct InterleaveHighWords {
  static constexpr int at(int i) { return kLanes / 2 + InterleaveLowWords::at(i); }
};
template <int Distance>
struct SwapLanes {
  static constexpr int at(int i) { return i ^ Distance; }
};

/// a and b byte by byte in turns: their first halves, or their second ones.
JLP_RULE Bytes16 interleave_low_bytes(Bytes16 a, Bytes16 b) {
  return JLP_SHUFFLE(Bytes16, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
JLP_RULE Bytes16 interleave_high_bytes(Bytes16 a, Bytes16 b) {
  return JLP_SHUFFLE(Bytes16, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/// kCount vectors seen as one sequence of elements, that many to a row: transposed, by log2(kCount) interleavings of the
/// first half of the vectors with the second.
template <int kCount, class V, class Low, class High>
JLP_RULE void transpose_by_interleaving(V (&v)[kCount], Low low, High high) {
  JLP_UNROLL(4)
  for (int step = 1; step < kCount; step *= 2) {
    V w[kCount];
    JLP_UNROLL(8)
    for (int i = 0; i < kCount / 2; ++i) {
      w[2 * i] = low(v[i], v[i + kCount / 2]);
      w[2 * i + 1] = high(v[i], v[i + kCount / 2]);
    }
    JLP_UNROLL(16)
    for (int i = 0; i < kCount; ++i) v[i] = w[i];
  }
}

/// lanes[i][j] -> lanes[j][i].
JLP_RULE void transpose(U32 (&v)[kLanes]) {
#if defined(JLP_ISA_AVX512)  // within quarters of a vector, then the quarters: that leaves the operands in place
  U32 w[kLanes];
  JLP_UNROLL(8)
  for (int i = 0; i < kLanes; i += 2) {
    w[i] = (U32)_mm512_unpacklo_epi32(raw(v[i]), raw(v[i + 1]));
    w[i + 1] = (U32)_mm512_unpackhi_epi32(raw(v[i]), raw(v[i + 1]));
  }
  JLP_UNROLL(4)
  for (int i = 0; i < kLanes; i += 4) {  // v[i + j]: lane j of each quarter of rows i to i + 3
    v[i] = (U32)_mm512_unpacklo_epi64(raw(w[i]), raw(w[i + 2]));
    v[i + 1] = (U32)_mm512_unpackhi_epi64(raw(w[i]), raw(w[i + 2]));
    v[i + 2] = (U32)_mm512_unpacklo_epi64(raw(w[i + 1]), raw(w[i + 3]));
    v[i + 3] = (U32)_mm512_unpackhi_epi64(raw(w[i + 1]), raw(w[i + 3]));
  }
  JLP_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    w[j] = (U32)_mm512_shuffle_i32x4(raw(v[j]), raw(v[4 + j]), 0x88);      // quarters 0 and 2 of rows 0 to 7
    w[4 + j] = (U32)_mm512_shuffle_i32x4(raw(v[j]), raw(v[4 + j]), 0xDD);  // 1 and 3
    w[8 + j] = (U32)_mm512_shuffle_i32x4(raw(v[8 + j]), raw(v[12 + j]), 0x88);
    w[12 + j] = (U32)_mm512_shuffle_i32x4(raw(v[8 + j]), raw(v[12 + j]), 0xDD);
  }
  JLP_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    v[j] = (U32)_mm512_shuffle_i32x4(raw(w[j]), raw(w[8 + j]), 0x88);
    v[8 + j] = (U32)_mm512_shuffle_i32x4(raw(w[j]), raw(w[8 + j]), 0xDD);
    v[4 + j] = (U32)_mm512_shuffle_i32x4(raw(w[4 + j]), raw(w[12 + j]), 0x88);
    v[12 + j] = (U32)_mm512_shuffle_i32x4(raw(w[4 + j]), raw(w[12 + j]), 0xDD);
  }
#elif defined(JLP_ISA_AVX2)  // the same with halves
  U32 w[kLanes];
  JLP_UNROLL(4)
  for (int i = 0; i < kLanes; i += 2) {
    w[i] = (U32)_mm256_unpacklo_epi32(raw(v[i]), raw(v[i + 1]));
    w[i + 1] = (U32)_mm256_unpackhi_epi32(raw(v[i]), raw(v[i + 1]));
  }
  JLP_UNROLL(2)
  for (int i = 0; i < kLanes; i += 4) {
    v[i] = (U32)_mm256_unpacklo_epi64(raw(w[i]), raw(w[i + 2]));
    v[i + 1] = (U32)_mm256_unpackhi_epi64(raw(w[i]), raw(w[i + 2]));
    v[i + 2] = (U32)_mm256_unpacklo_epi64(raw(w[i + 1]), raw(w[i + 3]));
    v[i + 3] = (U32)_mm256_unpackhi_epi64(raw(w[i + 1]), raw(w[i + 3]));
  }
  JLP_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    const U32 low = v[j], high = v[4 + j];  // lane j of each half of rows 0 to 3, and of rows 4 to 7
    v[j] = (U32)_mm256_permute2x128_si256(raw(low), raw(high), 0x20);
    v[4 + j] = (U32)_mm256_permute2x128_si256(raw(low), raw(high), 0x31);
  }
#else
  transpose_by_interleaving(
      v, [](U32 a, U32 b) { return shuffle<InterleaveLow>(a, b); },
      [](U32 a, U32 b) { return shuffle<InterleaveHigh>(a, b); });
#endif
}

/// 64-bit words [i][j] -> [j][i].
JLP_RULE void transpose_words(U32 (&v)[kWords]) {
  transpose_by_interleaving(
      v, [](U32 a, U32 b) { return shuffle<InterleaveLowWords>(a, b); },
      [](U32 a, U32 b) { return shuffle<InterleaveHighWords>(a, b); });
}

/// Bytes of kCount rows of 16: element k of row r to place k * kCount + r.
template <int kCount>
JLP_RULE void transpose(Bytes16 (&v)[kCount]) {
  transpose_by_interleaving(
      v, [](Bytes16 a, Bytes16 b) { return interleave_low_bytes(a, b); },
      [](Bytes16 a, Bytes16 b) { return interleave_high_bytes(a, b); });
}

/// The larger of each 16-bit half, unsigned magnitudes.
JLP_RULE U32 max_halves(U32 a, U32 b) {
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_max_epi16(raw(a), raw(b));
#elif defined(JLP_ISA_AVX2)
  return (U32)_mm256_max_epi16(raw(a), raw(b));
#elif defined(__SSE2__)
  return (U32)_mm_max_epi16(raw(a), raw(b));
#else
  return (U32)((I16)a > (I16)b ? (I16)a : (I16)b);
#endif
}

JLP_RULE U32 max_magnitude(U32 a, U32 b) {
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_max_epi32(raw(a), raw(b));
#elif defined(JLP_ISA_AVX2)
  return (U32)_mm256_max_epi32(raw(a), raw(b));
#else
  return (U32)((I32)a > (I32)b ? (I32)a : (I32)b);
#endif
}

/// max(lane 2i, lane 2i + 1) of a followed by b, for either of the two maxima above.
template <class Max>
JLP_RULE U32 pairwise_max(U32 a, U32 b, Max max) {
#if defined(JLP_ISA_AVX2)
  const __m256 x = (__m256)a, y = (__m256)b;  // within 128-bit halves first: one permute fewer
  const U32 most = max((U32)_mm256_shuffle_ps(x, y, 0x88), (U32)_mm256_shuffle_ps(x, y, 0xDD));
  return (U32)_mm256_permute4x64_epi64(raw(most), 0xD8);
#else
  return max(shuffle<EvenLanes>(a, b), shuffle<OddLanes>(a, b));
#endif
}

JLP_RULE uint32_t max_lane(U32 v) {
  uint32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

/// Whether every lane is below the limit; NaN is not.
JLP_RULE bool all_below(F32 v, float limit) {
#if defined(JLP_ISA_AVX512)
  return _mm512_cmp_ps_mask(raw(v), _mm512_set1_ps(limit), _CMP_NLT_UQ) == 0;
#elif defined(JLP_ISA_AVX2)
  return _mm256_movemask_ps(_mm256_cmp_ps(raw(v), _mm256_set1_ps(limit), _CMP_NLT_UQ)) == 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpnlt_ps(raw(v), _mm_set1_ps(limit))) == 0;
#else
  for (int i = 0; i < kLanes; ++i)
    if (!(v[i] < limit)) return false;
  return true;
#endif
}

/// Whether any lane is negative.
JLP_RULE bool any_negative(I16 v) {
#if defined(JLP_ISA_AVX512)
  return _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi16(-0x8000)) != 0;
#elif defined(JLP_ISA_AVX2)
  return !_mm256_testz_si256((__m256i)v, _mm256_set1_epi16(-0x8000));
#else
  typedef uint64_t Words __attribute__((vector_size(JLP_VECTOR_BYTES)));
  const Words words = (Words)v;
  return ((words[0] | words[1]) & 0x8000800080008000u) != 0;
#endif
}

JLP_RULE I16 min(I16 a, I16 b) {  // g++ 12 takes a comparison with a constant apart
#if defined(JLP_ISA_AVX512)
  return (I16)_mm512_min_epi16((__m512i)a, (__m512i)b);
#elif defined(JLP_ISA_AVX2)
  return (I16)_mm256_min_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (I16)_mm_min_epi16((__m128i)a, (__m128i)b);
#else
  return a < b ? a : b;
#endif
}

// Zero-extending loads: g++ 12 takes a vector conversion from narrow integers apart.

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
#define JLP_HAVE_HALF_CONVERSION  // between float16 bits in the 16-bit lanes and float32, subnormal ones too whatever the
                                  // mode
#endif
#if defined(JLP_ISA_AVX512)
JLP_RULE F32 from_half(__m256i bits) { return (F32)_mm512_cvtph_ps(bits); }
JLP_RULE __m256i to_half(F32 v) { return _mm512_cvtps_ph(raw(v), _MM_FROUND_TO_NEAREST_INT); }
#elif defined(JLP_ISA_AVX2)
JLP_RULE F32 from_half(__m128i bits) { return (F32)_mm256_cvtph_ps(bits); }
JLP_RULE __m128i to_half(F32 v) { return _mm256_cvtps_ph(raw(v), _MM_FROUND_TO_NEAREST_INT); }
#endif

/// kLanes bytes.
JLP_RULE U32 load_u8(const uint8_t* p) {
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(JLP_ISA_AVX2)
  return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(__SSE2__)
  const __m128i zero = _mm_setzero_si128(), bytes = _mm_cvtsi32_si128(load<int>(p));
  return (U32)_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero);
#else
  return __builtin_convertvector(load<QuarterU8>(p), U32);
#endif
}

/// The lower halves of the lanes.
JLP_RULE void store_u16(void* p, U32 v) { store(static_cast<uint8_t*>(p), __builtin_convertvector(v, HalfU16)); }

/// kLanes 16-bit numbers.
JLP_RULE U32 load_u16(const void* p) {
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_cvtepu16_epi32(load<__m256i>(static_cast<const uint8_t*>(p)));
#elif defined(JLP_ISA_AVX2)
  return (U32)_mm256_cvtepu16_epi32(load<__m128i>(static_cast<const uint8_t*>(p)));
#elif defined(__SSE2__)
  return (U32)_mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)), _mm_setzero_si128());
#else
  return __builtin_convertvector(load<HalfU16>(static_cast<const uint8_t*>(p)), U32);
#endif
}

// --- narrowing: four vectors of 32-bit lanes to one of bytes. `pack_*` leave the order the instruction set packs in, which
// `in_order` undoes, so that bytes can be combined before.

/// Low bytes; the upper ones are ignored.
JLP_RULE U8 pack_bytes(U32 v0, U32 v1, U32 v2, U32 v3) {
#if defined(JLP_ISA_AVX512)
  const __m512i m = _mm512_set1_epi32(0xFF);
  return (U8)_mm512_packus_epi16(_mm512_packus_epi32(_mm512_and_si512(raw(v0), m), _mm512_and_si512(raw(v1), m)),
                                 _mm512_packus_epi32(_mm512_and_si512(raw(v2), m), _mm512_and_si512(raw(v3), m)));
#elif defined(JLP_ISA_AVX2)
  const __m256i m = _mm256_set1_epi32(0xFF);
  return (U8)_mm256_packus_epi16(_mm256_packus_epi32(_mm256_and_si256(raw(v0), m), _mm256_and_si256(raw(v1), m)),
                                 _mm256_packus_epi32(_mm256_and_si256(raw(v2), m), _mm256_and_si256(raw(v3), m)));
#elif defined(__SSE2__)
  const __m128i m = _mm_set1_epi32(0xFF);
  return (U8)_mm_packus_epi16(_mm_packs_epi32(_mm_and_si128(raw(v0), m), _mm_and_si128(raw(v1), m)),
                              _mm_packs_epi32(_mm_and_si128(raw(v2), m), _mm_and_si128(raw(v3), m)));
#else
  U8 bytes;
  for (int i = 0; i < kLanes; ++i) {
    bytes[i] = static_cast<uint8_t>(v0[i]), bytes[kLanes + i] = static_cast<uint8_t>(v1[i]);
    bytes[2 * kLanes + i] = static_cast<uint8_t>(v2[i]), bytes[3 * kLanes + i] = static_cast<uint8_t>(v3[i]);
  }
  return bytes;
#endif
}

/// Numbers below 2^15, less an offset that leaves bytes.
JLP_RULE U8 pack_bytes_less(U32 v0, U32 v1, U32 v2, U32 v3, uint16_t offset) {
#if defined(JLP_ISA_AVX512)
  const __m512i off = _mm512_set1_epi16(static_cast<int16_t>(offset));
  return (U8)_mm512_packus_epi16(_mm512_sub_epi16(_mm512_packus_epi32(raw(v0), raw(v1)), off),
                                 _mm512_sub_epi16(_mm512_packus_epi32(raw(v2), raw(v3)), off));
#elif defined(JLP_ISA_AVX2)
  const __m256i off = _mm256_set1_epi16(static_cast<int16_t>(offset));
  return (U8)_mm256_packus_epi16(_mm256_sub_epi16(_mm256_packus_epi32(raw(v0), raw(v1)), off),
                                 _mm256_sub_epi16(_mm256_packus_epi32(raw(v2), raw(v3)), off));
#elif defined(__SSE2__)
  const __m128i off = _mm_set1_epi16(static_cast<int16_t>(offset));
  return (U8)_mm_packus_epi16(_mm_sub_epi16(_mm_packs_epi32(raw(v0), raw(v1)), off),
                              _mm_sub_epi16(_mm_packs_epi32(raw(v2), raw(v3)), off));
#else
  return pack_bytes(v0 - offset, v1 - offset, v2 - offset, v3 - offset);
#endif
}

/// 0x80 where a lane's sign bit is set, else 0.
JLP_RULE U8 pack_signs(F32 v0, F32 v1, F32 v2, F32 v3) {
#if defined(JLP_ISA_AVX512)
  return (U8)_mm512_packs_epi16(_mm512_packs_epi32(raw((U32)v0), raw((U32)v1)),
                                _mm512_packs_epi32(raw((U32)v2), raw((U32)v3))) &
         0x80;
#elif defined(JLP_ISA_AVX2)
  return (U8)_mm256_packs_epi16(_mm256_packs_epi32(raw((U32)v0), raw((U32)v1)),
                                _mm256_packs_epi32(raw((U32)v2), raw((U32)v3))) &
         0x80;
#elif defined(__SSE2__)
  return (U8)_mm_packs_epi16(_mm_packs_epi32(raw((U32)v0), raw((U32)v1)), _mm_packs_epi32(raw((U32)v2), raw((U32)v3))) &
         0x80;
#else
  return pack_bytes(L::bits(v0) >> 24, L::bits(v1) >> 24, L::bits(v2) >> 24, L::bits(v3) >> 24) & 0x80;
#endif
}

JLP_RULE U8 in_order(U8 packed) {
#if defined(JLP_ISA_AVX512)
  return (U8)_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                      (__m512i)packed);
#elif defined(JLP_ISA_AVX2)
  return (U8)_mm256_permutevar8x32_epi32((__m256i)packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  return packed;
#endif
}

/// Stores the low bytes of one vector: kLanes bytes.
JLP_RULE void store_low_bytes(uint8_t* out, U32 v) {
#if defined(JLP_ISA_AVX512) && !defined(JLP_EMULATE_AVX512)
  store(out, _mm512_cvtepi32_epi8(raw(v)));
#else
  const U8 bytes = in_order(pack_bytes(v, v, v, v));
  memcpy(out, &bytes, kLanes);
#endif
}

/// Of each byte the entry of the table that its value, 0 to 15, counts to.
JLP_RULE Bytes16 look_up(Bytes16 table, Bytes16 index) {
#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
  return (Bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#else
  Bytes16 found;
  for (int i = 0; i < 16; ++i) found[i] = table[index[i]];
  return found;
#endif
}

/// In order, what was packed of two vectors of 16-bit lanes.
JLP_RULE U8 halves_in_order(U8 packed) {
#if defined(JLP_ISA_AVX512)
  return (U8)_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15),
                                      (__m512i)packed);
#elif defined(JLP_ISA_AVX2)
  return (U8)_mm256_permute4x64_epi64((__m256i)packed, 0b11011000);
#else
  return packed;
#endif
}

/// 16-bit numbers below 256 as bytes, in order.
JLP_RULE U8 bytes_of(I16 low, I16 high) {
#if defined(JLP_ISA_AVX512)
  return halves_in_order((U8)_mm512_packus_epi16((__m512i)low, (__m512i)high));
#elif defined(JLP_ISA_AVX2)
  return halves_in_order((U8)_mm256_packus_epi16((__m256i)low, (__m256i)high));
#elif defined(__SSE2__)
  return (U8)_mm_packus_epi16((__m128i)low, (__m128i)high);
#else
  U8 bytes;
  for (int i = 0; i < 2 * kLanes; ++i) {
    bytes[i] = static_cast<uint8_t>(low[i]);
    bytes[i + 2 * kLanes] = static_cast<uint8_t>(high[i]);
  }
  return bytes;
#endif
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
