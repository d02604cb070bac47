// The NVFP4 GEMM: exact within a block of 16, sequential in float32 over blocks (numerics.md 9), so that every instruction
// set, tiling and number of threads gives the same bytes.
//
// A panel of up to 64 rows of b is unpacked into quads, 4 codes of one row in a 32-bit lane, and meets small tiles of rows
// of a, unpacked too. A code is twice its value, so products are four times too large, which a's scales make good. The byte
// dot products of x86 want one unsigned side: that side is stored 12 too large and 12 times the sum of the other is taken
// off again. Nothing is blocked along K: a tile's accumulators stay in registers all the way.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../numerics/gelu.h"
#include "../numerics/nvfp4.h"
#include "kernels.h"
#include "tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- layout

#if defined(JLP_ISA_AVX512)  // b unsigned and in registers, a broadcast by the instruction itself
using Code = uint8_t;
constexpr int kTileRows = 8, kTileVectors = 2;
constexpr uint8_t kRowsOffset = 0, kPanelOffset = 12;
#elif defined(JLP_ISA_AVX2)  // a unsigned and broadcast, b an operand in memory: the signed side can be one
using Code = uint8_t;
constexpr int kTileRows = 4, kTileVectors = 2;
constexpr uint8_t kRowsOffset = 12, kPanelOffset = 0;
#else
using Code = float;
constexpr int kTileRows = 4, kTileVectors = 2;
#endif
constexpr bool kIntegerDot = std::is_same_v<Code, uint8_t>;
constexpr int kTileColumns = kTileVectors * kLanes;
constexpr int kPanelColumns = 64;

/// One block of a tile of rows of a. They lie together: rows a power of two apart would share a few cache sets.
struct RowsBlock {
  Code code[kTileRows][kBlock];  // twice the values
  int32_t start[kTileRows];      // -kPanelOffset times their sum
  float scale[kTileRows];        // a quarter of the block scale
};

/// One block of kLanes rows of b.
struct alignas(64) PanelBlock {
  Code code[kBlock * kLanes];  // [quad][lane][4], or [k][lane]
  int32_t start[kLanes];       // -kRowsOffset times their sum
  float scale[kLanes];
};

// --- unpacking

/// lanes[i][j] -> lanes[j][i].
JLP_RULE void transpose(U32 (&v)[kLanes]) {
  JLP_UNROLL(4)
  for (int step = 1; step < kLanes; step *= 2) {
    U32 w[kLanes];
    JLP_UNROLL(16)
    for (int i = 0; i < kLanes / 2; ++i) {
      w[2 * i] = shuffle<InterleaveLow>(v[i], v[i + kLanes / 2]);
      w[2 * i + 1] = shuffle<InterleaveHigh>(v[i], v[i + kLanes / 2]);
    }
    JLP_UNROLL(16)
    for (int i = 0; i < kLanes; ++i) v[i] = w[i];
  }
}

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)

/// Twice the values of codes 0 to 15, as signed bytes, repeated over a vector.
JLP_RULE U8 twice_e2m1() {
  alignas(16) constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  U8 v;
  for (int i = 0; i < JLP_VECTOR_BYTES; i += 16) memcpy(reinterpret_cast<uint8_t*>(&v) + i, kTable, 16);
  return v;
}

/// Decodes 2 codes a byte into the low (even) and the high (odd) ones.
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

/// Bytes 0 to 3 and 4 to 7 of a block for every lane's row: quads of even codes, then of odd ones.
JLP_RULE void unpack_panel_block(U32 first, U32 second, PanelBlock& out) {
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

/// One row of a: blocks of 8 bytes to blocks of 16 codes in the order of the panel's quads.
__attribute__((noinline)) static void unpack_row(const uint8_t* data, int64_t blocks, int row, RowsBlock* out) {
  constexpr int kStep = JLP_VECTOR_BYTES / 8;
  for (int64_t block = 0; block < blocks; block += kStep) {
    const int count = static_cast<int>(std::min<int64_t>(kStep, blocks - block));
    U8 packed = U8{}, even, odd, halves[2];
    if (count == kStep)
      packed = load<U8>(data + block * 8);
    else
      memcpy(&packed, data + block * 8, count * 8);
    decode_nibbles(packed, kRowsOffset, even, odd);
    interleave_quads(even, odd, halves[0], halves[1]);
    const U32 sums = sum_eight(even + kPanelOffset) + sum_eight(odd + kPanelOffset);
    for (int b = 0; b < count; ++b) {
      memcpy(out[block + b].code[row], reinterpret_cast<const uint8_t*>(&halves[b % 2]) + b / 2 * 16, 16);
      if (kPanelOffset)
        out[block + b].start[row] = -kPanelOffset * (static_cast<int32_t>(sums[2 * b]) - kPanelOffset * kBlock);
    }
  }
}

#else

JLP_RULE void unpack_panel_block(U32 first, U32 second, PanelBlock& out) {
  for (int k = 0; k < 8; ++k) {
    store(out.code + k * kLanes, e2m1_decode<F32>((first >> (4 * k)) & 15u) * 2.0f);
    store(out.code + (8 + k) * kLanes, e2m1_decode<F32>((second >> (4 * k)) & 15u) * 2.0f);
  }
}

static void unpack_row(const uint8_t* data, int64_t blocks, int row, RowsBlock* out) {
  for (int64_t block = 0; block < blocks; ++block)
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = data[block * 8 + i];
      out[block].code[row][2 * i] = e2m1_decode<float>(byte & 15u) * 2.0f;
      out[block].code[row][2 * i + 1] = e2m1_decode<float>(byte >> 4) * 2.0f;
    }
}

#endif

/// kLanes rows of b; those beyond `rows` are zero.
__attribute__((noinline)) static void unpack_panel(const uint8_t* data, int64_t rows, int64_t blocks, PanelBlock* out) {
  constexpr int kStep = kLanes / 2;  // blocks in a vector of packed codes
  for (int64_t block = 0; block < blocks; block += kStep) {
    const int count = static_cast<int>(std::min<int64_t>(kStep, blocks - block));
    U32 v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      const uint8_t* at = data + (r * blocks + block) * 8;
      v[r] = U32{};
      if (r < rows && count == kStep)
        v[r] = load<U32>(at);
      else if (r < rows)
        memcpy(&v[r], at, count * 8);
    }
    transpose(v);  // v[2b]: bytes 0 to 3 of block b for every row, v[2b + 1]: bytes 4 to 7
    for (int b = 0; b < count; ++b) unpack_panel_block(v[2 * b], v[2 * b + 1], out[block + b]);
  }
}

/// Blocks of 16 codes along K.
static int64_t blocks_of(const MatmulProblem& p) { return divide_up(p.depth(), kBlock); }

/// The scales of one row, decoded and multiplied by a factor, `stride` floats apart.
static void decode_scales(const MatmulOperand& operand, int64_t rows, int64_t blocks, int64_t batch, int64_t row,
                          float factor, float* out, int64_t stride) {
  const int64_t scale_rows = operand.format.tiles ? divide_up(rows, kBlock) : rows;
  const uint8_t* scale = operand.scale + (batch * scale_rows + (operand.format.tiles ? row / kBlock : row)) * blocks;
  for (int64_t b = 0; b < blocks; b += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, blocks - b));
    alignas(64) uint32_t bytes[kLanes] = {};
    for (int i = 0; i < count; ++i) bytes[i] = scale[b + i];
    alignas(64) float decoded[kLanes];
    store(decoded, e4m3_decode<F32>(load<U32>(bytes)) * factor);
    for (int i = 0; i < count; ++i) out[(b + i) * stride] = decoded[i];
  }
}

// --- one tile

/// Four times the dot products of one block of a row of a with kLanes rows of b.
JLP_RULE F32 dot_block(const RowsBlock& rows, int r, const PanelBlock& panel) {
#if defined(JLP_ISA_AVX512)
  __m512i sum = _mm512_set1_epi32(rows.start[r]);
  JLP_UNROLL(4)
  for (int q = 0; q < 4; ++q) {
    int32_t quad;
    memcpy(&quad, rows.code[r] + 4 * q, 4);
    sum = _mm512_dpbusd_epi32(sum, _mm512_load_si512(panel.code + 64 * q), _mm512_set1_epi32(quad));
  }
  return L::to_float((U32)sum);
#elif defined(JLP_ISA_AVX2)
  __m256i sums[4];  // pairs of products: at most 4 * 576 in 16 bits
  JLP_UNROLL(4)
  for (int q = 0; q < 4; ++q) {
    int32_t quad;
    memcpy(&quad, rows.code[r] + 4 * q, 4);
    sums[q] = _mm256_maddubs_epi16(_mm256_set1_epi32(quad), load<__m256i>(panel.code + 32 * q));
  }
  const __m256i pairs = _mm256_add_epi16(_mm256_add_epi16(sums[0], sums[1]), _mm256_add_epi16(sums[2], sums[3]));
  const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  return L::to_float((U32)_mm256_add_epi32(sum, load<__m256i>(panel.start)));
#else
  F32 sum = F32{};  // small integers: exact in any order
  JLP_UNROLL(16)
  for (int k = 0; k < kBlock; ++k) sum += load<F32>(panel.code + k * kLanes) * rows.code[r][k];
  return sum;
#endif
}

/// Sums over blocks of dot products times scales. Panel vectors are `blocks` apart. With 16x16 blocks in b (kTiles) all
/// lanes of a vector share its scale, so that one product a row does for the vector.
template <int kRows, bool kTiles>
JLP_RULE void tile_products(const RowsBlock* rows, const PanelBlock* panel, int64_t blocks, F32 (&y)[kRows][kTileVectors]) {
  F32 sums[kRows][kTileVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kTileVectors; ++v) sums[r][v] = F32{};
  for (int64_t b = 0; b < blocks; ++b) {
    alignas(32) float products[kTileVectors][kTileRows];
    if (kTiles)
      for (int v = 0; v < kTileVectors; ++v)
        for (int r = 0; r < kTileRows; ++r) products[v][r] = rows[b].scale[r] * panel[v * blocks + b].scale[0];
    JLP_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      JLP_UNROLL(2)
      for (int v = 0; v < kTileVectors; ++v) {
        const PanelBlock& vector = panel[v * blocks + b];
        const F32 scale = kTiles ? L::splat(products[v][r]) : load<F32>(vector.scale) * rows[b].scale[r];
        sums[r][v] = L::multiply_add_exact(dot_block(rows[b], r, vector), scale, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kTileVectors; ++v) y[r][v] = sums[r][v];
}

// --- epilogue: * alpha, + bias, activation, + accumulate, one cast

JLP_RULE void finish_vector(const MatmulProblem& p, F32 y, float alpha, int64_t row, int64_t column, int64_t batch) {
  const int count = static_cast<int>(std::min<int64_t>(kLanes, p.columns - column));
  const int64_t index = (batch * p.rows + row) * p.columns + column;
  y *= alpha;
  if (p.bias) y += load_elements(p.bias, ElementType::kF32, batch * p.columns + column, count);
  if (p.activation == Activation::kGeluTanh) {
    if (p.pre_activation) store_elements(p.pre_activation, p.type, index, count, y);
    y = gelu_tanh(y);
  }
  if (p.accumulate) y += load_elements(p.accumulate, p.accumulate_type, index, count);
  store_elements(p.result, p.type, index, count, y);
}

template <int kRows, bool kTiles>
__attribute__((noinline)) void multiply_rows(const MatmulProblem& p, const RowsBlock* a, const PanelBlock* b, float alpha,
                                             int rows, int64_t row, int64_t column, int64_t batch) {
  F32 y[kRows][kTileVectors];
  tile_products<kRows, kTiles>(a, b, blocks_of(p), y);
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kTileVectors && column + v * kLanes < p.columns; ++v)
      finish_vector(p, y[r][v], alpha, row + r, column + v * kLanes, batch);
}

/// Few rows are rounded up to a power of two.
template <bool kTiles>
JLP_RULE void multiply_tile(const MatmulProblem& p, const RowsBlock* a, const PanelBlock* b, float alpha, int rows,
                            int64_t row, int64_t column, int64_t batch) {
  if (rows > 4) return multiply_rows<kTileRows, kTiles>(p, a, b, alpha, rows, row, column, batch);
  if (rows > 2) return multiply_rows<4, kTiles>(p, a, b, alpha, rows, row, column, batch);
  if (rows > 1) return multiply_rows<2, kTiles>(p, a, b, alpha, rows, row, column, batch);
  multiply_rows<1, kTiles>(p, a, b, alpha, rows, row, column, batch);
}

// --- chunks: a range of rows of a by a range of columns, the rows unpacked once, b a panel at a time

struct MatmulChunks {
  int64_t row_step = 128, column_step = 512, row_ranges, column_ranges;

  explicit MatmulChunks(const MatmulProblem& p) {
    while (true) {
      row_ranges = divide_up(p.rows, row_step), column_ranges = divide_up(p.columns, column_step);
      if (p.batch * row_ranges * column_ranges >= 8 || (row_step == 32 && column_step == kPanelColumns)) return;
      if (column_step > kPanelColumns)
        column_step /= 2;  // enough chunks for several threads
      else
        row_step /= 2;
    }
  }
  int64_t count(const MatmulProblem& p) const { return p.batch * row_ranges * column_ranges; }
};

static int64_t matmul_chunks(const MatmulProblem& p) { return MatmulChunks(p).count(p); }

/// Tiles of consecutive rows of a, [tiles][blocks].
static void load_rows(const MatmulProblem& p, int64_t batch, int64_t first, int64_t rows, RowsBlock* out) {
  for (int64_t i = 0; i < rows; ++i) {
    RowsBlock* tile = out + i / kTileRows * blocks_of(p);
    const int r = static_cast<int>(i % kTileRows);
    unpack_row(p.a.data + (batch * p.rows + first + i) * blocks_of(p) * 8, blocks_of(p), r, tile);
    decode_scales(p.a, p.rows, blocks_of(p), batch, first + i, 0.25f, &tile->scale[r], sizeof(RowsBlock) / sizeof(float));
  }
}

/// Vectors of consecutive rows of b, [vectors][blocks].
static void load_panel(const MatmulProblem& p, int64_t batch, int64_t first, int64_t columns, PanelBlock* out) {
  for (int64_t i = 0; i < divide_up(columns, kTileColumns) * kTileVectors; ++i) {
    const int64_t row = first + i * kLanes, rows = std::clamp<int64_t>(first + columns - row, 0, kLanes);
    PanelBlock* vector = out + i * blocks_of(p);
    unpack_panel(p.b.data + (batch * p.columns + row) * blocks_of(p) * 8, rows, blocks_of(p), vector);
    if (p.b.format.tiles && rows > 0)  // one number a block, in lane 0
      decode_scales(p.b, p.columns, blocks_of(p), batch, row, 1.0f, vector->scale, sizeof(PanelBlock) / sizeof(float));
    else
      for (int r = 0; r < rows; ++r)
        decode_scales(p.b, p.columns, blocks_of(p), batch, row + r, 1.0f, vector->scale + r,
                      sizeof(PanelBlock) / sizeof(float));
  }
}

static void matmul_chunk(const MatmulProblem& p, int64_t chunk) {
  const FlushDenormals flush;
  const MatmulChunks chunks(p);
  const int64_t batch = chunk / (chunks.row_ranges * chunks.column_ranges);
  const int64_t first_row = chunk / chunks.column_ranges % chunks.row_ranges * chunks.row_step;
  const int64_t first_column = chunk % chunks.column_ranges * chunks.column_step;
  const int64_t rows = std::min(chunks.row_step, p.rows - first_row);
  const int64_t last_column = std::min(first_column + chunks.column_step, p.columns);
  const float alpha = (p.a.amax[batch] * p.b.amax[batch]) * kNvfp4ProductScale;

  const int64_t rows_size = divide_up(rows, kTileRows) * blocks_of(p) * sizeof(RowsBlock);
  const int64_t panel_size = kPanelColumns / kLanes * blocks_of(p) * sizeof(PanelBlock);
  uint8_t* scratch = thread_scratch(panel_size + rows_size);
  PanelBlock* panel = reinterpret_cast<PanelBlock*>(scratch);
  RowsBlock* tiles = reinterpret_cast<RowsBlock*>(scratch + panel_size);

  load_rows(p, batch, first_row, rows, tiles);
  for (int64_t column = first_column; column < last_column; column += kPanelColumns) {
    const int64_t columns = std::min<int64_t>(kPanelColumns, last_column - column);
    load_panel(p, batch, column, columns, panel);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int tile_rows = static_cast<int>(std::min<int64_t>(kTileRows, rows - row));
      for (int64_t at = 0; at < columns; at += kTileColumns) {
        const RowsBlock* a = tiles + row / kTileRows * blocks_of(p);
        const PanelBlock* b = panel + at / kLanes * blocks_of(p);
        if (p.b.format.tiles)
          multiply_tile<true>(p, a, b, alpha, tile_rows, first_row + row, column + at, batch);
        else
          multiply_tile<false>(p, a, b, alpha, tile_rows, first_row + row, column + at, batch);
      }
    }
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
