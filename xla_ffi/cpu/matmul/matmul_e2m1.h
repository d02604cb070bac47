// GEMMs of 4-bit operands, NVFP4 and MXFP4: dot products exact within a block, sequential in float32 over blocks
// (numerics.md 9), so that every instruction set, tiling and number of threads gives the same bytes.
//
// A panel of up to 64 rows of b is unpacked into quads, 4 codes of one row in a 32-bit lane, and meets small tiles of rows
// of a, unpacked too, 16 codes at a time: a granule. A code is twice its value, so dot products are four times too large.
// The byte dot products of x86 want one unsigned side: that side is stored 12 too large and 12 times the sum of the other is
// taken off again. Nothing is blocked along K: a tile's accumulators stay in registers all the way.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../numerics/float8.h"
#include "../../numerics/nvfp4.h"
#include "matmul_chunks.h"
#include "matmul_epilogue.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- layout

#if defined(JLP_ISA_AVX512)  // b unsigned and in registers, a broadcast by the instruction itself
using Code = uint8_t;
constexpr int kTileRows = 8, kTileVectors = 2, kMostRows = 512;
constexpr uint8_t kRowsOffset = 0, kPanelOffset = 12;
#elif defined(JLP_ISA_AVX2)  // a unsigned and broadcast, b an operand in memory: the signed side can be one
using Code = uint8_t;
constexpr int kTileRows = 4, kTileVectors = 2, kMostRows = 256;
constexpr uint8_t kRowsOffset = 12, kPanelOffset = 0;
#else
using Code = float;
constexpr int kTileRows = 4, kTileVectors = 2, kMostRows = 128;
#endif
constexpr bool kIntegerDot = std::is_same_v<Code, uint8_t>;
constexpr int kTileColumns = kTileVectors * kLanes;
constexpr int kPanelColumns = 64;

/// One granule of a tile of rows of a. They lie together: rows a power of two apart would share a few cache sets.
struct RowsGranule {
  Code code[kTileRows][kBlock];  // twice the values
  int32_t start[kTileRows];      // -kPanelOffset times their sum
  float scale[kTileRows];        // of the block that begins here
};

/// One granule of kLanes rows of b.
struct alignas(64) PanelGranule {
  Code code[kBlock * kLanes];  // [quad][lane][4], or [k][lane]
  int32_t start[kLanes];       // -kRowsOffset times their sum
  float scale[kLanes];
};

constexpr int64_t kRowsStride = sizeof(RowsGranule) / sizeof(float), kPanelStride = sizeof(PanelGranule) / sizeof(float);

// --- unpacking

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)

/// Twice the values of codes 0 to 15, as signed bytes, repeated over a vector.
JLP_RULE U8 twice_e2m1() {
  alignas(16) constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  U8 v;
  for (int i = 0; i < JLP_VECTOR_BYTES; i += 16) memcpy(reinterpret_cast<uint8_t*>(&v) + i, kTable, 16);
  return v;
}

/// Decodes 2 codes per byte into the low (even) and the high (odd) ones.
JLP_RULE void decode_nibbles(U8 packed, uint8_t offset, U8& even, U8& odd) {
  const U8 table = twice_e2m1() + offset, low = packed & 15, high = (U8)((U32)packed >> 4) & 15;
#if defined(JLP_ISA_AVX512)
  even = (U8)_mm512_shuffle_epi8((__m512i)table, (__m512i)low), odd = (U8)_mm512_shuffle_epi8((__m512i)table, (__m512i)high);
#else
  even = (U8)_mm256_shuffle_epi8((__m256i)table, (__m256i)low), odd = (U8)_mm256_shuffle_epi8((__m256i)table, (__m256i)high);
#endif
}

/// Sums of each 8 consecutive unsigned bytes, in the 64-bit lanes.
JLP_RULE U32 sum_eight(U8 v) {
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_sad_epu8((__m512i)v, _mm512_setzero_si512());
#else
  return (U32)_mm256_sad_epu8((__m256i)v, _mm256_setzero_si256());
#endif
}

/// Interleaves the 64-bit lanes of each 128-bit part.
JLP_RULE void interleave_quads(U8 a, U8 b, U8& low, U8& high) {
#if defined(JLP_ISA_AVX512)
  low = (U8)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b), high = (U8)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b);
#else
  low = (U8)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b), high = (U8)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
#endif
}

/// Bytes 0 to 3 and 4 to 7 of a granule for every lane's row: quads of even codes, then of odd ones.
JLP_RULE void unpack_panel_granule(U32 first, U32 second, PanelGranule& out) {
  U8 quad[4];
  decode_nibbles((U8)first, kPanelOffset, quad[0], quad[2]);
  decode_nibbles((U8)second, kPanelOffset, quad[1], quad[3]);
  for (int q = 0; q < 4; ++q) store(out.code + q * JLP_VECTOR_BYTES, quad[q]);
#if defined(JLP_ISA_AVX2)
  __m256i sum = _mm256_setzero_si256();
  for (int q = 0; q < 4; ++q) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(1), (__m256i)quad[q]));
  store(out.start, _mm256_madd_epi16(sum, _mm256_set1_epi16(-kRowsOffset)));
#endif
}

/// One row of a, the codes in the order of the panel's quads.
__attribute__((noinline)) static void unpack_row(const uint8_t* data, int64_t granules, int row, RowsGranule* out) {
  constexpr int kStep = JLP_VECTOR_BYTES / 8;
  for (int64_t g = 0; g < granules; g += kStep) {
    const int count = static_cast<int>(std::min<int64_t>(kStep, granules - g));
    U8 packed = U8{}, even, odd, halves[2];
    if (count == kStep)
      packed = load<U8>(data + g * 8);
    else
      memcpy(&packed, data + g * 8, count * 8);
    decode_nibbles(packed, kRowsOffset, even, odd);
    interleave_quads(even, odd, halves[0], halves[1]);
    const U32 sums = sum_eight(even + kPanelOffset) + sum_eight(odd + kPanelOffset);
    for (int i = 0; i < count; ++i) {
      memcpy(out[g + i].code[row], reinterpret_cast<const uint8_t*>(&halves[i % 2]) + i / 2 * 16, 16);
      if (kPanelOffset) out[g + i].start[row] = -kPanelOffset * (static_cast<int32_t>(sums[2 * i]) - kPanelOffset * kBlock);
    }
  }
}

#else

JLP_RULE void unpack_panel_granule(U32 first, U32 second, PanelGranule& out) {
  for (int k = 0; k < 8; ++k) {
    store(out.code + k * kLanes, e2m1_decode<F32>((first >> (4 * k)) & 15u) * 2.0f);
    store(out.code + (8 + k) * kLanes, e2m1_decode<F32>((second >> (4 * k)) & 15u) * 2.0f);
  }
}

static void unpack_row(const uint8_t* data, int64_t granules, int row, RowsGranule* out) {
  for (int64_t g = 0; g < granules; ++g)
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = data[g * 8 + i];
      out[g].code[row][2 * i] = e2m1_decode<float>(byte & 15u) * 2.0f;
      out[g].code[row][2 * i + 1] = e2m1_decode<float>(byte >> 4) * 2.0f;
    }
}

#endif

/// kLanes rows of b, `stride` bytes apart; those beyond `rows` are zero.
__attribute__((noinline)) static void unpack_panel(const uint8_t* data, int64_t stride, int64_t rows, int64_t granules,
                                                   PanelGranule* out) {
  constexpr int kStep = kLanes / 2;  // granules in a vector of packed codes
  int64_t g = 0;
  for (; rows == kLanes && g + kStep <= granules; g += kStep) {  // everything stays in registers
    U32 v[kLanes];
    JLP_UNROLL(16)
    for (int r = 0; r < kLanes; ++r) v[r] = load<U32>(data + r * stride + g * 8);
    transpose(v);  // v[2i]: bytes 0 to 3 of granule i for every row, v[2i + 1]: bytes 4 to 7
    JLP_UNROLL(8)
    for (int i = 0; i < kStep; ++i) unpack_panel_granule(v[2 * i], v[2 * i + 1], out[g + i]);
  }
  for (; g < granules; g += kStep) {
    const int count = static_cast<int>(std::min<int64_t>(kStep, granules - g));
    U32 v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      v[r] = U32{};
      if (r < rows) memcpy(&v[r], data + r * stride + g * 8, count * 8);
    }
    transpose(v);
    for (int i = 0; i < count; ++i) unpack_panel_granule(v[2 * i], v[2 * i + 1], out[g + i]);
  }
}

// --- one tile

/// Four times the dot products of one block of a row of a with kLanes rows of b.
template <int kGranules>
JLP_RULE F32 dot_block(const RowsGranule* rows, int r, const PanelGranule* panel) {
#if defined(JLP_ISA_AVX512)
  __m512i sum = _mm512_setzero_si512();
  JLP_UNROLL(2)
  for (int g = 0; g < kGranules; ++g) {
    const __m512i start = _mm512_set1_epi32(rows[g].start[r]);
    sum = g == 0 ? start : _mm512_add_epi32(sum, start);
    JLP_UNROLL(4)
    for (int q = 0; q < 4; ++q) {
      int32_t quad;
      memcpy(&quad, rows[g].code[r] + 4 * q, 4);
      sum = _mm512_dpbusd_epi32(sum, _mm512_load_si512(panel[g].code + 64 * q), _mm512_set1_epi32(quad));
    }
  }
  return L::to_float((U32)sum);
#elif defined(JLP_ISA_AVX2)
  __m256i pairs = _mm256_setzero_si256();  // of products: at most 8 * 576 in 16 bits
  JLP_UNROLL(2)
  for (int g = 0; g < kGranules; ++g) {
    __m256i sums[4];
    JLP_UNROLL(4)
    for (int q = 0; q < 4; ++q) {
      int32_t quad;
      memcpy(&quad, rows[g].code[r] + 4 * q, 4);
      sums[q] = _mm256_maddubs_epi16(_mm256_set1_epi32(quad), load<__m256i>(panel[g].code + 32 * q));
    }
    const __m256i four = _mm256_add_epi16(_mm256_add_epi16(sums[0], sums[1]), _mm256_add_epi16(sums[2], sums[3]));
    pairs = g == 0 ? four : _mm256_add_epi16(pairs, four);
  }
  __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  for (int g = 0; g < kGranules; ++g) sum = _mm256_add_epi32(sum, load<__m256i>(panel[g].start));
  return L::to_float((U32)sum);
#else
  F32 sum = F32{};  // small integers: exact in any order
  JLP_UNROLL(2)
  for (int g = 0; g < kGranules; ++g) {
    JLP_UNROLL(16)
    for (int k = 0; k < kBlock; ++k) sum += load<F32>(panel[g].code + k * kLanes) * rows[g].code[r][k];
  }
  return sum;
#endif
}

/// Blocks of one granule whose terms are exact, in any grouping: a's scales make good for the four times.
struct Nvfp4Scales {
  static constexpr int kGranules = 1;
  static constexpr float kRowsFactor = 0.25f;

  JLP_RULE F32 decode(U32 bytes) { return float8_decode<E4M3, F32>(bytes); }
  JLP_RULE float alpha(const MatmulProblem& p, int64_t batch) {
    return (p.a.amax[batch] * p.b.amax[batch]) * kNvfp4ProductScale;
  }
  JLP_RULE bool moderate(const MatmulOperand&, int64_t, int64_t, int64_t, int64_t) { return false; }  // matters to MX

  /// Adds the terms of one block. With 16x16 blocks in b (kTiles) all lanes of a vector share its scale, so that one product
  /// a row does for the vector. Panel vectors are `stride` apart.
  template <int kRows, bool kTiles>
  JLP_RULE void add_block(const RowsGranule* rows, const PanelGranule* panel, int64_t stride,
                          F32 (&sums)[kRows][kTileVectors]) {
    alignas(32) float products[kTileVectors][kTileRows];
    if (kTiles)
      for (int v = 0; v < kTileVectors; ++v)
        for (int r = 0; r < kTileRows; ++r) products[v][r] = rows->scale[r] * panel[v * stride].scale[0];
    JLP_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      JLP_UNROLL(2)
      for (int v = 0; v < kTileVectors; ++v) {
        const PanelGranule& vector = panel[v * stride];
        const F32 scale = kTiles ? L::splat(products[v][r]) : load<F32>(vector.scale) * rows->scale[r];
        sums[r][v] = L::multiply_add_exact(dot_block<1>(rows, r, &vector), scale, sums[r][v]);
      }
    }
  }
};

/// Blocks of two granules. Scales are powers of two: a term is exact or overflows or, underflowing, counts as zero, so every
/// product is rounded on its own. The quarter goes onto the dot product, since a scale may be the least normal number.
/// Moderate scales (kModerate) cannot overflow or underflow: those products are exact in any grouping.
struct Mxfp4Scales {
  static constexpr int kGranules = 2;
  static constexpr float kRowsFactor = 1.0f;

  JLP_RULE F32 decode(U32 bytes) { return e8m0_decode<F32>(bytes); }
  JLP_RULE float alpha(const MatmulProblem&, int64_t) { return 1.0f; }

  static constexpr int kLeast = 127 - 50, kMost = 127 + 50;  // scale bytes

  /// Whether all scales of these rows are moderate, but for small ones of blocks of zeros.
  static bool moderate(const MatmulOperand& operand, int64_t operand_rows, int64_t batch, int64_t first, int64_t rows) {
    const int64_t blocks = operand.format.blocks(operand.columns);
    for (int64_t row = first; row < first + rows; ++row) {
      const uint8_t* scales = scales_of_row(operand, operand_rows, batch, row);
      const uint8_t* codes = operand.data + (batch * operand_rows + row) * operand.data_stride();
      for (int64_t b = 0; b < blocks; b += 16) {
        Bytes16 some = Bytes16{} + kLeast;
        memcpy(&some, scales + b, std::min<int64_t>(16, blocks - b));
        if (!any((Bytes16)(some - kLeast > kMost - kLeast))) continue;
        for (int64_t i = b; i < std::min(b + 16, blocks); ++i)
          if (scales[i] > kMost || (scales[i] < kLeast && any(load<Bytes16>(codes + 16 * i) & 0x77))) return false;
      }
    }
    return true;
  }
  JLP_RULE bool any(Bytes16 bytes) {
    uint64_t words[2];
    memcpy(words, &bytes, sizeof words);
    return (words[0] | words[1]) != 0;
  }

  template <int kRows, bool kModerate>
  JLP_RULE void add_block(const RowsGranule* rows, const PanelGranule* panel, int64_t stride,
                          F32 (&sums)[kRows][kTileVectors]) {
    JLP_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      JLP_UNROLL(2)
      for (int v = 0; v < kTileVectors; ++v) {
        const PanelGranule* vector = panel + v * stride;
        const F32 dot = dot_block<2>(rows, r, vector), scale = load<F32>(vector->scale);
        if (kModerate)
          sums[r][v] = L::multiply_add_exact(dot, (scale * 0.25f) * rows->scale[r], sums[r][v]);
        else
          sums[r][v] += ((dot * 0.25f) * rows->scale[r]) * scale;
      }
    }
  }
};

// --- chunks: the rows of a unpacked once, b a panel at a time

template <class Scales>
struct MatmulE2M1 {
  static int64_t chunks_per_matrix(const MatmulProblem& p) { return cut(p).per_matrix(); }

  static void chunk(const MatmulProblem& p, int64_t batch, int64_t chunk) {
    const MatmulRange range = cut(p).range(chunk);
    const int64_t rows_size = divide_up(range.rows, kTileRows) * granules(p) * sizeof(RowsGranule);
    const int64_t panel_size = kPanelColumns / kLanes * granules(p) * sizeof(PanelGranule);
    uint8_t* scratch = thread_scratch(panel_size + rows_size);
    PanelGranule* panel = reinterpret_cast<PanelGranule*>(scratch);
    RowsGranule* tiles = reinterpret_cast<RowsGranule*>(scratch + panel_size);

    load_rows(p, batch, range.first_row, range.rows, tiles);
    const bool moderate = Scales::moderate(p.a, p.rows, batch, range.first_row, range.rows);
    for (int64_t at = 0; at < range.columns; at += kPanelColumns) {
      const int64_t columns = std::min<int64_t>(kPanelColumns, range.columns - at);
      load_panel(p, batch, range.first_column + at, columns, panel);
      Ahead<1> next = panel_after(p, batch, range, at + kPanelColumns);
      const bool shorter =
          shared_scales(p) || (moderate && Scales::moderate(p.b, p.columns, batch, range.first_column + at, columns));
      for (int64_t row = 0; row < range.rows; row += kTileRows) {
        const Tile tile = {tiles + row / kTileRows * granules(p), batch, range.first_row + row,
                           static_cast<int>(std::min<int64_t>(kTileRows, range.rows - row))};
        for (int64_t column = 0; column < columns; column += kTileColumns) {
          const PanelGranule* b = panel + column / kLanes * granules(p);
          if (shorter)
            multiply_tile<true>(p, tile, b, range.first_column + at + column, next);
          else
            multiply_tile<false>(p, tile, b, range.first_column + at + column, next);
        }
      }
    }
  }

 private:
  struct Tile {
    const RowsGranule* a;
    int64_t batch, row;
    int rows;
  };

  static MatmulChunks cut(const MatmulProblem& p) {
    const int64_t columns = p.rows > 128 ? 512 : 2048;  // few rows are unpacked as seldom
    return {p, {kMostRows, columns}, {32, kPanelColumns}, {kTileRows, kPanelColumns}};
  }

  static int64_t granules(const MatmulProblem& p) { return p.a.format.blocks(p.depth()) * Scales::kGranules; }

  /// Whether a vector's lanes have one scale, and add_block knows to make use of that.
  static bool shared_scales(const MatmulProblem& p) { return p.b.format.tiles && std::is_same_v<Scales, Nvfp4Scales>; }

  /// Tiles of consecutive rows of a, [tiles][granules].
  static void load_rows(const MatmulProblem& p, int64_t batch, int64_t first, int64_t rows, RowsGranule* out) {
    const auto decode = [](U32 bytes) { return Scales::decode(bytes) * Scales::kRowsFactor; };
    for (int64_t i = 0; i < rows; ++i) {
      RowsGranule* tile = out + i / kTileRows * granules(p);
      const int r = static_cast<int>(i % kTileRows);
      unpack_row(p.a.data + (batch * p.rows + first + i) * p.a.data_stride(), granules(p), r, tile);
      decode_scales(scales_of_row(p.a, p.rows, batch, first + i), p.a.format.blocks(p.depth()), decode, &tile->scale[r],
                    Scales::kGranules * kRowsStride);
    }
  }

  /// The panel from column `at` of the chunk on.
  static Ahead<1> panel_after(const MatmulProblem& p, int64_t batch, const MatmulRange& range, int64_t at) {
    if (at >= range.columns) return {};
    const int64_t columns = std::min<int64_t>(kPanelColumns, range.columns - at), row = range.first_column + at;
    const uint8_t* data = p.b.data + (batch * p.columns + row) * p.b.data_stride();
    const uint8_t* scales = p.b.format.tiles ? nullptr : scales_of_row(p.b, p.columns, batch, row);
    const int64_t tiles = divide_up(range.rows, kTileRows) * (kPanelColumns / kTileColumns);
    const int64_t calls = tiles * p.b.format.blocks(p.depth());
    return {data, p.b.data_stride(), p.b.format.row_bytes(p.depth()), scales, p.b.scale_stride(), columns, calls};
  }

  /// Vectors of consecutive rows of b, [vectors][granules].
  static void load_panel(const MatmulProblem& p, int64_t batch, int64_t first, int64_t columns, PanelGranule* out) {
    for (int64_t i = 0; i < divide_up(columns, kTileColumns) * kTileVectors; ++i) {
      const int64_t row = first + i * kLanes, rows = std::clamp<int64_t>(first + columns - row, 0, kLanes);
      PanelGranule* vector = out + i * granules(p);
      unpack_panel(p.b.data + (batch * p.columns + row) * p.b.data_stride(), p.b.data_stride(), rows, granules(p), vector);
      const int64_t blocks = p.b.format.blocks(p.depth()), stride = Scales::kGranules * kPanelStride;
      if (!shared_scales(p))
        decode_scales_of_lanes(p.b, p.columns, batch, row, rows, 0, blocks, Scales::decode, vector->scale, stride);
      else if (rows > 0)  // in lane 0
        decode_scales(scales_of_row(p.b, p.columns, batch, row), blocks, Scales::decode, vector->scale, stride);
    }
  }

  /// kShorter: add_block's way with fewer products, for shared or for moderate scales.
  template <int kRows, bool kShorter>
  __attribute__((noinline)) static void multiply_rows(const MatmulProblem& p, const Tile& tile, const PanelGranule* b,
                                                      int64_t column, Ahead<1>& next) {
    const MatmulRange range{tile.row, tile.rows, column, std::min<int64_t>(kTileColumns, p.columns - column)};
    fetch_accumulated(p, tile.batch, range);
    F32 sums[kRows][kTileVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] = F32{};
    const int64_t count = granules(p);
    for (int64_t g = 0; g < count; g += Scales::kGranules) {
      next.fetch();
      Scales::template add_block<kRows, kShorter>(tile.a + g, b + g, count, sums);
    }
    const float alpha = Scales::alpha(p, tile.batch);
    F32 y[kRows][kTileVectors];  // indexed by a variable: apart from the sums, which stay in registers
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kTileVectors; ++v) y[r][v] = sums[r][v] * alpha;
    finish_range(p, tile.batch, range, [&](int64_t r, int64_t v) { return y[r][v]; });
  }

  /// Few rows are rounded up to a power of two.
  template <bool kShorter>
  JLP_RULE void multiply_tile(const MatmulProblem& p, const Tile& tile, const PanelGranule* b, int64_t column,
                              Ahead<1>& next) {
    if (tile.rows > 4) return multiply_rows<kTileRows, kShorter>(p, tile, b, column, next);
    if (tile.rows > 2) return multiply_rows<4, kShorter>(p, tile, b, column, next);
    if (tile.rows > 1) return multiply_rows<2, kShorter>(p, tile, b, column, next);
    multiply_rows<1, kShorter>(p, tile, b, column, next);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
