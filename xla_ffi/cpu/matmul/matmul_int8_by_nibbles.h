// GEMMs of 8-bit integers by rows with a 4-bit weight, Int4 or MXFP4 (numerics.md 9), in matmul_steps.h's walk: the sum over
// a group is exact, and y = fma(sum, s_b, y) at its end; s_a at the end of K.
//
// A unit is a quad of codes, as in matmul_int8.h; those of E2M1 are twice their value. The unsigned side of byte dot
// products is, with AVX-512, b, stored `kOffset` too large, and with AVX2 a, stored 128 too large: there b's codes are so
// small that the products of several quads are added in 16 bits. What that adds is in the number that a group's sum starts
// from. AMX multiplies signed bytes, and its tiles hold no floats: the sums of groups go through memory to vectors, which
// scale them. A group of 32 is half a tile deep.
#pragma once

#include "../../numerics/float8.h"
#include "matmul_steps.h"
#if defined(JLP_ISA_AVX512_AMX)
#include "amx_tiles.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {

struct Int8ByNibbles {
  using Sum = float;
  using Part = MatmulPart<Int8ByNibbles>;
#if defined(JLP_ISA_AVX512_AMX)
  static constexpr int kRows = 32, kMostRows = 512, kLeastRows = 64, kStep = 1024, kRowsTogether = kTileHeight;
  static constexpr int kAfterRow = 16, kLinesAhead = 2, kFetchesOfTile = kStep / kTileDepth;  // as matmul_int8.h has them
#else
#if defined(JLP_ISA_AVX512)
  static constexpr int kRows = 12, kMostRows = 516, kLeastRows = 96, kStep = 512;
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 4, kMostRows = 256, kLeastRows = 32, kStep = 512;
#else
  static constexpr int kRows = 4, kMostRows = 256, kLeastRows = 32, kStep = 256;
#endif
  static constexpr int kRowsTogether = 1, kAfterRow = 0, kLinesAhead = kStep / 128, kFetchesOfTile = 1;
#endif
  static constexpr int kPanel = 8;
  static constexpr int kGroup = kLeastNibbleGroup, kMaxBlocks = 2 * kStep / kGroup;  // scales and, after them, starts
  static constexpr int kStarts = kMaxBlocks / 2;
  static constexpr bool kTileOfRows = kRowsTogether > 1;
  static_assert(kStep % kMostNibbleGroup == 0, "groups lie in one step");

  /// The numbers of codes 0 to 15; a group's sum is kFactor of that of products with them; and how many quads' products AVX2
  /// adds in 16 bits, which hold 255 * 2 * kQuads of the largest.
  struct Int4 {
    static constexpr int8_t kTable[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    static constexpr int kOffset = 8, kQuads = 8;
    static constexpr float kFactor = 1;
  };
  struct Mxfp4 {
    static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static constexpr int kOffset = 12, kQuads = 4;
    static constexpr float kFactor = 0.5f;
  };
  template <class Visit>
  static void with_sums(const MatmulProblem& p, Visit visit) {
    p.b.format.code == CodeType::kInt4 ? visit(Int4{}) : visit(Mxfp4{});
  }

  static F32 number(const float* sums) { return load<F32>(sums); }

  /// The scales of kLanes rows of b, those from `row` on, for `count` groups from `first` on: [group][lane].
  static void load_scales(const MatmulProblem& p, int64_t batch, int64_t row, int64_t rows, int64_t first, int64_t count,
                          float* out) {
    if (p.b.format.scaling == Scaling::kE8M0)
      return decode_scales_of_lanes(p.b, p.columns, batch, row, rows, first, count, e8m0_decode<F32>, out, kLanes);
    const bool bf16 = p.b.format.scale_type == ElementType::kBF16;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* from = scales_of_row(p.b, p.columns, batch, row + r) + 2 * first;
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = load<uint16_t>(from + 2 * i);
        out[i * kLanes + r] = bf16 ? bf16_decode<float>(bits) : f16_decode<float>(bits);
      }
    }
  }

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)

  using Unit = uint32_t;
  static constexpr int kPerUnit = 4;
#if defined(JLP_ISA_AVX512_AMX)
  static constexpr bool kUnsignedPanel = false, kUnsignedRows = false;
#elif defined(JLP_ISA_AVX512)
  static constexpr bool kUnsignedPanel = true, kUnsignedRows = false;
#else
  static constexpr bool kUnsignedPanel = false, kUnsignedRows = true;
#endif

  // --- unpacking: of 8 codes the even ones, then the odd ones, as the nibbles of 4 bytes have them

  /// Codes of one row of a, followed by zeros up to the step's end, and, of each group, what its sums start from.
  static void load_row(const Part& part, int64_t i, const uint8_t* data, int64_t, int64_t depth) {
    auto* out = reinterpret_cast<uint8_t*>(part.rows + i * Part::kRowUnits);
    memcpy(out, data, depth);
    memset(out + depth, 0, kStep - depth);
    const int64_t group = part.p.b.format.block;
    float* starts = part.rows_scale + i * kMaxBlocks;
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    for (int64_t first = 0; first < depth; first += group) {
      __m256i sums = _mm256_setzero_si256();  // of codes 128 too large
      for (int64_t at = first; at < first + group; at += 32) {
        const __m256i codes = _mm256_shuffle_epi8(load<__m256i>(out + at), order);
        const __m256i above = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        sums = _mm256_add_epi64(sums, _mm256_sad_epu8(above, _mm256_setzero_si256()));
        store(out + at, kUnsignedRows ? above : codes);
      }
      if (!kUnsignedPanel) continue;
      int64_t parts[4];
      memcpy(parts, &sums, sizeof parts);
      const int32_t sum = static_cast<int32_t>(parts[0] + parts[1] + parts[2] + parts[3] - 128 * group);
      const int32_t start = -(part.p.b.format.code == CodeType::kInt4 ? Int4::kOffset : Mxfp4::kOffset) * sum;
      memcpy(starts + first / group, &start, 4);
    }
  }

  /// Vector v of the panel: `rows` rows of b, those from `column` of the chunk on; lanes beyond are never stored.
  static void load_vector(const Part& part, int64_t v, int64_t column, int64_t rows, const uint8_t* data, int64_t k,
                          int64_t depth) {
    const Format& format = part.p.b.format;
    const int64_t groups = format.blocks(depth), stride = part.p.b.data_stride();
    Unit* out = part.panel + v * Part::kUnits * kLanes;
    float* scales = part.panel_scale + v * kMaxBlocks * kLanes;
    load_scales(part.p, part.batch, part.range.first_column + column, rows, k / format.block, groups, scales);
    with_sums(part.p, [&](auto sums) { load_codes<decltype(sums)>(data, stride, rows, groups * format.block / 2, out); });
    if (!kUnsignedRows) return;
    for (int64_t g = 0; g < groups; ++g) {
      U32 sum = U32{};
      for (int64_t q = 0; q < format.block / 4; ++q, out += kLanes) sum += sum_quads(load<U32>(out));
      store(scales + (kStarts + g) * kLanes, sum * static_cast<uint32_t>(-128));
    }
  }

  template <class Sums>
  static void load_codes(const uint8_t* data, int64_t stride, int64_t rows, int64_t bytes, Unit* out) {
    const auto table = [] {
      alignas(16) int8_t once[16];
      for (int i = 0; i < 16; ++i) once[i] = static_cast<int8_t>(Sums::kTable[i] + (kUnsignedPanel ? Sums::kOffset : 0));
      U8 repeated;
      for (int i = 0; i < JLP_VECTOR_BYTES; i += 16) memcpy(reinterpret_cast<uint8_t*>(&repeated) + i, once, 16);
      return repeated;
    }();
    for (int64_t at = 0; at < bytes; at += JLP_VECTOR_BYTES) {
      const int64_t count = std::min<int64_t>(JLP_VECTOR_BYTES, bytes - at);
      U32 lanes[kLanes];
      if (rows == kLanes && count == JLP_VECTOR_BYTES) {
        JLP_UNROLL(16)
        for (int r = 0; r < kLanes; ++r) lanes[r] = load<U32>(data + r * stride + at);
      } else {
        for (int r = 0; r < kLanes; ++r) {
          lanes[r] = U32{};
          if (r < rows) memcpy(&lanes[r], data + r * stride + at, count);
        }
      }
      transpose(lanes);
      for (int w = 0; 4 * w < count; ++w, out += 2 * kLanes) {
        store(out, look_up_bytes(table, (U8)lanes[w] & 15));
        store(out + kLanes, look_up_bytes(table, (U8)(lanes[w] >> 4) & 15));
      }
    }
  }

  JLP_RULE U8 look_up_bytes(U8 table, U8 index) {
#if defined(JLP_ISA_AVX512)
    return (U8)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#else
    return (U8)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#endif
  }

  // --- one tile

#if defined(JLP_ISA_AVX512)

  JLP_RULE U32 sum_quads(U32) { return U32{}; }  // the panel has no starts

#endif
#if defined(JLP_ISA_AVX512_AMX)

  static constexpr int kGroupsTogether = 4;  // whose sums meet y at once: each alone would read and write it

  /// Up to 32 rows from `row` on, rounded up to 16, by kVectors vectors of the panel from `at` on, which lies at `vector` in
  /// y. Sums of groups go from tiles through memory to vectors.
  template <class Sums>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t count, int64_t vector,
                                                      int64_t at, int64_t depth, Ahead<kLinesAhead>& next) {
    constexpr int64_t kRowBytes = Part::kRowUnits * 4, kVector = Part::kUnits * kLanes, kSums = kRows * kLanes;
    const int64_t group = part.p.b.format.block, groups = part.p.b.format.blocks(depth);
    const int64_t step = tile_depth(part.p.b.format);
    alignas(64) int32_t sums[kGroupsTogether][kVectors * kSums];
    for (int64_t g = 0; g < groups; g += kGroupsTogether) {
      const int64_t together = std::min<int64_t>(kGroupsTogether, groups - g);
      const Unit* a = part.rows + row * Part::kRowUnits + g * group / 4;
      const Unit* b = part.panel + at * kVector + g * group / 4 * kLanes;
      for (int64_t i = 0; i < together; ++i, a += group / 4, b += group / 4 * kLanes) {
        if (count > kTileHeight)
          multiply_tiles<true, false>(a, kRowBytes, b, kVector, sums[i], kSums, group, step, next);
        else
          multiply_tiles<false, false>(a, kRowBytes, b, kVector, sums[i], kSums, group, step, next);
      }
      for (int64_t v = 0; v < kVectors; ++v)
        with_count<kGroupsTogether>(together, [&](auto constant) {
          add_groups<Sums, decltype(constant)::value>(sums[0] + v * kSums,
                                                      part.panel_scale + ((at + v) * kMaxBlocks + g) * kLanes, count,
                                                      part.y + ((vector + at + v) * part.rows_held + row) * kLanes);
        });
    }
  }

  /// The sums of kGroups groups, one after another, scaled and added to `rows` vectors of y.
  template <class Sums, int kGroups>
  JLP_RULE void add_groups(const int32_t* sums, const float* scales, int64_t rows, float* y) {
    F32 scale[kGroups];
    JLP_UNROLL(4)
    for (int g = 0; g < kGroups; ++g) scale[g] = load<F32>(scales + g * kLanes);
    for (int64_t r = 0; r < rows; ++r, sums += kLanes, y += kLanes) {
      F32 total = load<F32>(y);
      JLP_UNROLL(4)
      for (int g = 0; g < kGroups; ++g) {
        F32 sum = L::to_float(load<U32>(sums + g * kVectors * kRows * kLanes));
        if (Sums::kFactor != 1) sum *= Sums::kFactor;
        total = L::fused_multiply_add(sum, scale[g], total);
      }
      store(y, total);
    }
  }

#else
#if defined(JLP_ISA_AVX512)

  /// The sums of one group, added to its starts.
  template <class, int kCount, int kWidth>
  JLP_RULE void add_group(const Unit* a, const Unit* b, int64_t quads, U32 (&sums)[kCount][kWidth]) {
    int64_t q = 0;
    do {  // not `for`: g++ would copy all sums in each turn, for a group of none
      U32 vectors[kWidth];
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) vectors[v] = load<U32>(b + (v * Part::kUnits + q) * kLanes);
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        const __m512i quad = _mm512_set1_epi32(static_cast<int>(a[r * Part::kRowUnits + q]));
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v) sums[r][v] = (U32)_mm512_dpbusd_epi32(raw(sums[r][v]), raw(vectors[v]), quad);
      }
    } while (++q < quads);
  }

#else

  JLP_RULE U32 sum_quads(U32 quads) {
    const __m256i one = _mm256_set1_epi16(1), pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), raw(quads));
    return (U32)_mm256_madd_epi16(pairs, one);
  }

  template <class Sums, int kCount, int kWidth>
  JLP_RULE void add_group(const Unit* a, const Unit* b, int64_t quads, U32 (&sums)[kCount][kWidth]) {
    do {
      __m256i pairs[kCount][kWidth];
      JLP_UNROLL(8)
      for (int q = 0; q < Sums::kQuads; ++q) {
        JLP_UNROLL(4)
        for (int r = 0; r < kCount; ++r) {
          const __m256i quad = _mm256_set1_epi32(static_cast<int>(a[r * Part::kRowUnits + q]));
          JLP_UNROLL(8)
          for (int v = 0; v < kWidth; ++v) {
            const __m256i some = _mm256_maddubs_epi16(quad, load<__m256i>(b + (v * Part::kUnits + q) * kLanes));
            pairs[r][v] = q == 0 ? some : _mm256_add_epi16(pairs[r][v], some);
          }
        }
      }
      JLP_UNROLL(4)
      for (int r = 0; r < kCount; ++r) {
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v) sums[r][v] += (U32)_mm256_madd_epi16(pairs[r][v], _mm256_set1_epi16(1));
      }
      a += Sums::kQuads, b += Sums::kQuads * kLanes;
    } while ((quads -= Sums::kQuads) > 0);
  }

#endif

  /// kCount rows from `row` on by kWidth vectors of the panel from `at` on, which lies at `vector` in y.
  template <class Sums, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const int64_t group = part.p.b.format.block, stride = part.rows_held * kLanes;
    const float* row_starts = part.rows_scale + row * kMaxBlocks;
    const float* scales = part.panel_scale + at * kMaxBlocks * kLanes;
    float* y = part.y + ((vector + at) * part.rows_held + row) * kLanes;
    for (int64_t g = 0; g < part.p.b.format.blocks(depth); ++g) {
      U32 sums[kCount][kWidth];
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v)
          sums[r][v] = kUnsignedPanel ? U32{} + load<uint32_t>(row_starts + r * kMaxBlocks + g)
                                      : load<U32>(scales + (v * kMaxBlocks + kStarts + g) * kLanes);
      }
      const Unit* a = part.rows + row * Part::kRowUnits + g * group / 4;
      const Unit* b = part.panel + (at * Part::kUnits + g * group / 4) * kLanes;
      add_group<Sums, kCount, kWidth>(a, b, group / 4, sums);
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v) {
          const F32 scale = load<F32>(scales + (v * kMaxBlocks + g) * kLanes);
          float* to = y + v * stride + r * kLanes;
          F32 sum = L::to_float(sums[r][v]);
          if (Sums::kFactor != 1) sum *= Sums::kFactor;
          store(to, L::fused_multiply_add(sum, scale, load<F32>(to)));
        }
      }
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

  static void load_vector(const Part& part, int64_t v, int64_t column, int64_t rows, const uint8_t* data, int64_t k,
                          int64_t depth) {
    const Format& format = part.p.b.format;
    const int64_t stride = part.p.b.data_stride();
    Unit* out = part.panel + v * Part::kUnits * kLanes;
    load_scales(part.p, part.batch, part.range.first_column + column, rows, k / format.block, format.blocks(depth),
                part.panel_scale + v * kMaxBlocks * kLanes);
    with_sums(part.p, [&](auto sums) {
      for (int64_t i = 0; i < depth; ++i)
        for (int64_t r = 0; r < kLanes; ++r)
          out[i * kLanes + r] = r < rows ? decltype(sums)::kTable[(data[r * stride + i / 2] >> (i % 2 * 4)) & 15] : 0;
    });
  }

  template <class Sums, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const int64_t group = part.p.b.format.block;
    const Unit *a = part.rows + row * Part::kRowUnits, *b = part.panel + at * Part::kUnits * kLanes;
    const float* scales = part.panel_scale + at * kMaxBlocks * kLanes;
    for (int64_t first = 0; first < depth; first += group, scales += kLanes)
      for (int r = 0; r < kCount; ++r)
        for (int v = 0; v < kWidth; ++v) {
          F32 sum = F32{};  // of small integers: exact
          for (int64_t k = first; k < std::min(first + group, depth); ++k)
            sum += a[r * Part::kRowUnits + k] * load<F32>(b + (v * Part::kUnits + k) * kLanes);
          float* to = part.y + ((vector + at + v) * part.rows_held + row + r) * kLanes;
          store(to, L::fused_multiply_add(sum * Sums::kFactor, load<F32>(scales + v * kMaxBlocks * kLanes), load<F32>(to)));
        }
  }

#endif
};

using MatmulInt8ByNibbles = MatmulInSteps<Int8ByNibbles>;

}  // namespace JLP_ISA
}  // namespace jaxlowprec
