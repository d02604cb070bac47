// GEMMs of 8-bit integers by rows (numerics.md 9), in matmul_steps.h's walk: sums of all of K are exact, so that every
// instruction set and tiling gives the same bytes.
//
// A unit is a quad, 4 codes of one row in a 32-bit lane. The byte dot products of x86 want one unsigned side:
//   AVX2      |b|, and a with b's sign: a's codes are within +-127 and b's within -128 to 127, so that the sum of a pair of
//             products, at most 2 * 127 * 128, fits 16 bits
//   AVX-512   b is stored 128 too large, and 128 times the sum of a's codes is taken off again; what overflows on the way
//             wraps, and the result does not
// AMX multiplies signed bytes (amx_tiles.h). Elsewhere codes are float32 numbers, whose sums over a step are exact.
#pragma once

#include "matmul_steps.h"
#if defined(JLP_ISA_AVX512_AMX)
#include "amx_tiles.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {

struct Int8Codes {
  using Sum = int32_t;
  using Part = MatmulPart<Int8Codes>;
#if defined(JLP_ISA_AVX512_AMX)
  static constexpr int kRows = 32, kMostRows = 512, kLeastRows = 64, kStep = 512, kPanel = 8, kRowsTogether = kTileHeight;
  static constexpr int kAfterRow = 16;  // rows a power of two apart would share a few cache sets
  static constexpr int kLinesAhead = 2, kFetchesOfTile = kStep / kTileDepth;
#else
#if defined(JLP_ISA_AVX512)
  static constexpr int kRows = 12, kMostRows = 516, kLeastRows = 96, kStep = 512;
  static constexpr int kAfterRow = 1;  // -128 times the sum of the step's codes
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 4, kMostRows = 256, kLeastRows = 32, kStep = 1024, kAfterRow = 0;
#else
  static constexpr int kRows = 4, kMostRows = 256, kLeastRows = 32, kStep = 256, kAfterRow = 0;
  static_assert(kStep * 127 * 128 < 1 << 24, "float32 holds a step's sums");
#endif
  static constexpr int kPanel = 8, kRowsTogether = 1, kLinesAhead = kStep / 64, kFetchesOfTile = 1;
#endif
  static constexpr int kMaxBlocks = 0;
  static constexpr bool kTileOfRows = kRowsTogether > 1;

  struct Exact {};
  template <class Visit>
  static void with_sums(const MatmulProblem&, Visit visit) {
    visit(Exact{});
  }

  static F32 number(const int32_t* sums) { return L::to_float(load<U32>(sums)); }

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)

  using Unit = uint32_t;
  static constexpr int kPerUnit = 4;
#if defined(JLP_ISA_AVX512) && !defined(JLP_ISA_AVX512_AMX)
  static constexpr uint8_t kPanelSign = 0x80;  // what makes b 128 larger
#else
  static constexpr uint8_t kPanelSign = 0;
#endif

  // --- unpacking

  /// Codes of one row of a, followed by zeros up to a whole tile of AMX: b's there may be anything.
  static void load_row(const Part& part, int64_t i, const uint8_t* data, int64_t, int64_t depth) {
    Unit* out = part.rows + i * Part::kRowUnits;
    memcpy(out, data, depth);
    memset(reinterpret_cast<uint8_t*>(out) + depth, 0, divide_up(depth, 64) * 64 - depth);
#if defined(JLP_ISA_AVX512) && !defined(JLP_ISA_AVX512_AMX)
    __m512i sums = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += 64)
      sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), load<__m512i>(out + k / 4));
    const U32 lanes = (U32)sums;
    uint32_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    out[Part::kUnits] = sum * static_cast<uint32_t>(-128);
#endif
  }

  /// Vector v of the panel: quads of `rows` rows of b; lanes beyond are never stored.
  static void load_vector(const Part& part, int64_t v, int64_t, int64_t rows, const uint8_t* data, int64_t, int64_t depth) {
    const int64_t stride = part.p.b.data_stride();
    Unit* out = part.panel + v * Part::kUnits * kLanes;
    const auto store_quads = [&](U32 quads) { store(out, (U32)((U8)quads ^ kPanelSign)), out += kLanes; };
    int64_t at = 0;
    for (; rows == kLanes && at + JLP_VECTOR_BYTES <= depth; at += JLP_VECTOR_BYTES) {  // everything stays in registers
      U32 lanes[kLanes];
      JLP_UNROLL(16)
      for (int r = 0; r < kLanes; ++r) lanes[r] = load<U32>(data + r * stride + at);
      transpose(lanes);
      JLP_UNROLL(16)
      for (int q = 0; q < kLanes; ++q) store_quads(lanes[q]);
    }
    for (; at < depth; at += JLP_VECTOR_BYTES) {
      const int64_t count = std::min<int64_t>(JLP_VECTOR_BYTES, depth - at);
      U32 lanes[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        lanes[r] = U32{};
        if (r < rows) memcpy(&lanes[r], data + r * stride + at, count);
      }
      transpose(lanes);
      for (int q = 0; q < kLanes; ++q) store_quads(lanes[q]);
    }
  }

  // --- one tile

#if defined(JLP_ISA_AVX512_AMX)

  /// Up to 32 rows from `row` on, rounded up to 16, by kVectors vectors of the panel from `at` on, which lies at `vector` in
  /// y.
  template <class>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t count, int64_t vector,
                                                      int64_t at, int64_t depth, Ahead<kLinesAhead>& next) {
    constexpr int64_t kRowBytes = Part::kRowUnits * 4, kVector = Part::kUnits * kLanes;
    const Unit *a = part.rows + row * Part::kRowUnits, *b = part.panel + at * kVector;
    const int64_t sums_next = part.rows_held * kLanes;
    int32_t* sums = part.y + (vector + at) * sums_next + row * kLanes;
    if (count > kTileHeight)
      multiply_tiles<true, true>(a, kRowBytes, b, kVector, sums, sums_next, depth, kTileDepth, next);
    else
      multiply_tiles<false, true>(a, kRowBytes, b, kVector, sums, sums_next, depth, kTileDepth, next);
  }

#else

  /// sums + the dot products of a quad of a with kLanes quads of b; of AVX2 |b|, b's absolute values.
#if defined(JLP_ISA_AVX512)
  JLP_RULE __m512i magnitude(const Unit*) { return _mm512_setzero_si512(); }
  JLP_RULE __m512i add_quads(__m512i sums, uint32_t a, const Unit* b, __m512i) {
    return _mm512_dpbusd_epi32(sums, load<__m512i>(b), _mm512_set1_epi32(static_cast<int>(a)));
  }
  using Vector = __m512i;
#else
  JLP_RULE __m256i magnitude(const Unit* b) { return _mm256_abs_epi8(load<__m256i>(b)); }
  JLP_RULE __m256i add_quads(__m256i sums, uint32_t a, const Unit* b, __m256i magnitude) {
    const __m256i signed_a = _mm256_sign_epi8(_mm256_set1_epi32(static_cast<int>(a)), load<__m256i>(b));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_a), _mm256_set1_epi16(1)));
  }
  using Vector = __m256i;
#endif

  /// kCount rows from `row` on by kWidth vectors of the panel from `at` on, which lies at `vector` in y.
  template <class, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const Unit* a = part.rows + row * Part::kRowUnits;
    const Unit* b = part.panel + at * Part::kUnits * kLanes;
    int32_t* y = part.y + ((vector + at) * part.rows_held + row) * kLanes;
    const int64_t stride = part.rows_held * kLanes;
    Vector sums[kCount][kWidth];
    JLP_UNROLL(12)
    for (int r = 0; r < kCount; ++r) {
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) {
        const U32 start = load<U32>(y + v * stride + r * kLanes);
        sums[r][v] = (Vector)(kPanelSign ? start + a[r * Part::kRowUnits + Part::kUnits] : start);
      }
    }
    for (int64_t k = 0; k < divide_up(depth, 4); ++k, b += kLanes) {
      Vector magnitudes[kWidth];
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) magnitudes[v] = magnitude(b + v * Part::kUnits * kLanes);
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v)
          sums[r][v] = add_quads(sums[r][v], a[r * Part::kRowUnits + k], b + v * Part::kUnits * kLanes, magnitudes[v]);
      }
    }
    JLP_UNROLL(12)
    for (int r = 0; r < kCount; ++r) {
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) store(y + v * stride + r * kLanes, sums[r][v]);
    }
  }

#endif
#else

  using Unit = float;
  static constexpr int kPerUnit = 1;

  static void load_row(const Part& part, int64_t i, const uint8_t* data, int64_t, int64_t depth) {
    const auto* codes = reinterpret_cast<const int8_t*>(data);
    std::copy(codes, codes + depth, part.rows + i * Part::kRowUnits);
  }

  static void load_vector(const Part& part, int64_t v, int64_t, int64_t rows, const uint8_t* data, int64_t, int64_t depth) {
    const int64_t stride = part.p.b.data_stride();
    Unit* out = part.panel + v * Part::kUnits * kLanes;
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t r = 0; r < kLanes; ++r) out[k * kLanes + r] = r < rows ? static_cast<int8_t>(data[r * stride + k]) : 0;
  }

  template <class, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const Unit* a = part.rows + row * Part::kRowUnits;
    const Unit* b = part.panel + at * Part::kUnits * kLanes;
    F32 sums[kCount][kWidth] = {};
    for (int64_t k = 0; k < depth; ++k) {
      JLP_UNROLL(4)
      for (int r = 0; r < kCount; ++r) {
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v)
          sums[r][v] += a[r * Part::kRowUnits + k] * load<F32>(b + (v * Part::kUnits + k) * kLanes);
      }
    }
    JLP_UNROLL(4)
    for (int r = 0; r < kCount; ++r) {
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) {
        int32_t* y = part.y + ((vector + at + v) * part.rows_held + row + r) * kLanes;
        store(y, load<U32>(y) + L::truncate(sums[r][v]));
      }
    }
  }

#endif
};

using MatmulInt8 = MatmulInSteps<Int8Codes>;

}  // namespace JLP_ISA
}  // namespace jaxlowprec
