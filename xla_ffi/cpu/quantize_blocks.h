// Quantisation to MXFP8, MXFP4, Float8Block and Float8Tensor: along rows, along columns, or both in one pass over the input
// (numerics.md 1 and 4 to 7).
//
// Rows: the maxima of 16 elements fold into those of blocks; scales of a span of groups come before its codes.
// Columns and square tiles: a tile of 128 rows is staged, the maxima of its columns are vertical, and its codes are made row
// by row, each column with its own factor, then transposed 16 by 16 bytes into lines of the K-major result. Where both
// directions have the same codes they are made once.
// Bytes moved per element: the input once (twice with a tensor's amax), 1 or 1/2 written a direction.
#pragma once

#include <new>

#include "amax.h"
#include "codes.h"
#include "kernels.h"
#include "random.h"
#include "scales.h"
#include "tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kLargestBlock = 128;
constexpr int kUnit = std::max(kGroup, kLargestBlock);  // elements along a row: whole groups and whole blocks
constexpr int kUnitGroups = kUnit / kGroup;
constexpr int kUnitGranules = kUnit / kBlock;
constexpr int kTileBlocks = kColumnTileRows / 32;  // most blocks down a tile

/// What one matrix of the batch is quantised with.
struct BlockContext {
  Format format;
  BlockScales scales;
  Random random;  // its own key
  float tensor_encode = 1;

  BlockContext(const QuantizeProblem& p, const QuantizeDirection& direction, int64_t batch)
      : format(p.format), scales(p.format), random(direction.random) {
    if (random.key) random.key += 2 * batch;
    if (is_tensor())
      tensor_encode = float8_tensor_encode_scale(direction.tensor[batch], p.encode_scale_given, scales.float8);
  }
  bool is_tensor() const { return format.scaling == Scaling::kTensor; }
  /// Where an amax and a scale stand for more than one row.
  bool is_shared() const { return is_tensor() || format.tiles; }
};

// --- rows

/// Groups of a row, or of the rows of a tile, that lie together in memory: kUnit-aligned, so that blocks are whole.
struct BlockSpan {
  alignas(64) uint32_t amax[kSpan * kLanes];      // of granules
  alignas(64) float encode[kSpan * kLanes];       // of granules
  alignas(64) uint8_t scale[kSpan * kLanes / 2];  // a byte for 2 granules, or 4 bytes for 8
  bool finite;

  template <class E>
  __attribute__((noinline)) void compute(const typename E::Storage* x, int groups, const BlockContext& context) {
    if (context.is_tensor()) return compute_tensor<E>(x, groups, context);
    finite = true;
    for (int g = 0; g < groups; ++g) store(amax + g * kLanes, E::block_amax(x + g * kGroup));
    for (int g = groups; g % 8; ++g) store(amax + g * kLanes, U32{});
    context.format.block == 32 ? compute_of_two(groups, context) : compute_of_eight(groups, context);
  }

 private:
  template <class E>
  void compute_tensor(const typename E::Storage* x, int groups, const BlockContext& context) {
    U32 most = U32{};
    for (int g = 0; g < groups; ++g) {
      most = max_magnitude(most, E::group_amax(x + g * kGroup));
      store(encode + g * kLanes, L::splat(context.tensor_encode));
    }
    finite = max_lane(most) < kInfinityBits;
  }

  void compute_of_two(int groups, const BlockContext& context) {
    for (int g = 0; g < groups; g += 2) {
      const auto max = [](U32 a, U32 b) { return max_magnitude(a, b); };
      U32 stored;
      F32 factor;
      finite &= context.scales.compute(pairwise_max(load<U32>(amax + g * kLanes), load<U32>(amax + (g + 1) * kLanes), max),
                                       stored, factor);
      context.scales.store_scales(scale + g / 2 * kLanes, stored);
      store_interleaved(encode + g * kLanes, factor, factor);
    }
  }

  void compute_of_eight(int groups, const BlockContext& context) {
    for (int g = 0; g < groups; g += 8) {
      U32 m[8], stored;
      F32 factor;
      for (int i = 0; i < 8; ++i) m[i] = load<U32>(amax + (g + i) * kLanes);
      finite &= context.scales.compute(fold_eight(m, [](U32 a, U32 b) { return max_magnitude(a, b); }), stored, factor);
      context.scales.store_scales(scale + g / 2 * kLanes, stored);
      float* spread = encode + g * kLanes;
      for (int i = 0; i < 8 * kLanes; ++i) spread[i] = factor[i / 8];
    }
  }
};

/// Codes of elements that were not finite become NaN with their signs.
template <class E>
__attribute__((noinline)) void write_nan_codes(const typename E::Storage* x, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const U32 bits = L::bits(E::load_lanes(x + i));
    for (int lane = 0; lane < kLanes; ++lane)
      if ((bits[lane] & kMagnitudeBits) >= kInfinityBits)
        codes[i + lane] = static_cast<uint8_t>(kE4M3NaN | (bits[lane] >> 24 & 0x80u));
  }
}
static_assert(kE4M3NaN == kE5M2NaN);

/// How many bytes `elements` codes take.
template <class Element>
constexpr int64_t code_bytes(int64_t elements) {
  return std::is_same_v<Element, E2M1> ? elements / 2 : elements;
}

/// One group of 8-bit floats.
template <class E, class Element, bool kStochastic>
JLP_RULE void encode_float8_group(const typename E::Storage* x, const float* encode, const uint8_t* random, uint8_t* data) {
  JLP_UNROLL(4)
  for (int i = 0; i < kGroup; i += 4 * kLanes)
    encode_float8<E, Element, kStochastic>(
        x + i, [&](int k) { return L::splat(encode[(i + k * kLanes) / kBlock]); },
        [&](int k) { return load_u8(random + i + k * kLanes); }, data + i);
}

/// The codes of a span.
template <class E, class Element, bool kStochastic>
__attribute__((noinline)) void encode_span(const typename E::Storage* x, int groups, const BlockSpan& span,
                                           const RandomSpan<kStochastic>& random, const BlockContext& context,
                                           uint8_t* data) {
  constexpr bool kPacked = std::is_same_v<Element, E2M1>;
  const bool ordinary = span.finite && context.scales.up;  // of E2M1
  for (int g = 0; g < groups; ++g) {
    const char* next_span = reinterpret_cast<const char*>(x + (kSpan + g) * kGroup);  // a page that none fetches ahead
    for (size_t line = 0; line < kGroup * sizeof *x; line += 64) __builtin_prefetch(next_span + line);
    uint8_t* to = data + code_bytes<Element>(g * kGroup);
    if constexpr (kPacked)
      quantize_row_group<E, kStochastic>(x + g * kGroup, span.encode + g * kLanes, ordinary, random.bytes[g], to);
    else
      encode_float8_group<E, Element, kStochastic>(x + g * kGroup, span.encode + g * kLanes, random.bytes[g], to);
  }
  if (kPacked || __builtin_expect(span.finite, 1)) return;
  if (context.is_tensor()) return write_nan_codes<E>(x, groups * kGroup, data);
  for (int i = 0; i < groups * kLanes; ++i)
    if (span.encode[i] != span.encode[i]) memset(data + i * kBlock, 0, kBlock);
}

/// A run of elements of one row, quantised with blocks along it.
template <class E, class Element, bool kStochastic>
void quantize_blocks_of_row(const typename E::Storage* x, int64_t elements, const BlockContext& context, uint32_t row,
                            const uint32_t* granules, uint8_t* data, uint8_t* scale) {
  BlockSpan span;
  RandomSpan<kStochastic> random;
  while (elements > 0) {
    alignas(64) typename E::Storage padded[kUnit];
    alignas(64) uint8_t codes[kUnit];
    alignas(64) uint32_t padded_granules[kUnitGranules] = {};
    const bool whole = elements >= kUnit;
    const int groups = static_cast<int>(whole ? std::min<int64_t>(kSpan, elements / kUnit * kUnitGroups) : kUnitGroups);
    const int64_t count = whole ? groups * kGroup : elements;
    if (!whole) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, x, count * sizeof *x);
      if (kStochastic) memcpy(padded_granules, granules, divide_up(count, kBlock) * sizeof *granules);
    }
    const auto* from = whole ? x : padded;
    const uint32_t* ids = whole ? granules : padded_granules;
    span.template compute<E>(from, groups, context);
    for (int g = 0; kStochastic && g < groups; ++g) random_row_group(context.random, row, ids + g * kLanes, random.bytes[g]);
    encode_span<E, Element, kStochastic>(from, groups, span, random, context, whole ? data : codes);
    if (!whole) memcpy(data, codes, context.format.row_bytes(count));
    if (!context.is_tensor()) {
      const int64_t bytes = context.format.blocks(count) * context.scales.bytes();
      memcpy(scale, span.scale, bytes);
      scale += bytes;
    }
    x += count, elements -= count, data += code_bytes<Element>(count), granules += count / kBlock;
  }
}

// --- tiles

/// A tile and what is made of it; it lies in the thread's scratch memory.
template <class E>
struct BlockTile {
  Staged<E, kColumnTileRows, kUnit> input;
  alignas(64) uint8_t codes[kColumnTileRows][kUnit];
  alignas(64) uint32_t amax[kTileBlocks][kUnit];  // of columns, a block of rows each
  alignas(64) uint32_t scale[kTileBlocks][kUnit];
  alignas(64) float encode[kTileBlocks][kUnit];
  bool finite;

  /// How many rows share a scale of a column, as far as a tile can see.
  static int block_rows(const BlockContext& context) { return context.is_tensor() ? kColumnTileRows : context.format.block; }
  int blocks_down(const BlockContext& context) const { return static_cast<int>(divide_up(input.rows, block_rows(context))); }

  /// Scales and factors of all columns: of their own blocks, of square tiles, or the tensor's.
  void compute(const BlockContext& context) {
    finite = true;
    if (context.is_tensor()) {
      finite = amax_of<E>(input.x[0], kColumnTileRows * kUnit) < kInfinityBits;
      std::fill_n(encode[0], kUnit, context.tensor_encode);
      return;
    }
    const int block = context.format.block;
    for (int b = 0; b < blocks_down(context); ++b) {
      for (int i = 0; i < kUnit; i += 2 * kLanes) E::column_amax(&input.x[b * block][i], block, kUnit, &amax[b][i]);
      for (int i = 0; context.format.tiles && i < kUnit; i += block) {
        U32 most = U32{};
        for (int k = 0; k < block; k += kLanes) most = max_magnitude(most, load<U32>(&amax[b][i + k]));
        std::fill_n(&amax[b][i], block, max_lane(most));
      }
      for (int i = 0; i < kUnit; i += kLanes) {
        U32 stored;
        F32 factor;
        finite &= context.scales.compute(load<U32>(&amax[b][i]), stored, factor);
        store(&scale[b][i], stored), store(&encode[b][i], factor);
      }
    }
  }
};

/// 16 rows of a tile, each column with its own factor. `random` has four words a column: byte r of them is row r's.
template <class E, class Element, bool kStochastic>
__attribute__((noinline)) void encode_columns_of_granule(const typename E::Storage* x, const float* encode,
                                                         const uint32_t (*random)[kUnit], int columns, uint8_t* codes) {
  const auto byte = [&](int row, int column) {
    return kStochastic ? (load<U32>(&random[row / 4][column]) >> (8 * (row % 4))) & 0xFFu : U32{};
  };
  for (int r = 0; r < kBlock; r += std::is_same_v<Element, E2M1> ? 2 : 1, codes += kUnit)
    for (int i = 0; i < columns; i += 4 * kLanes)
      if constexpr (std::is_same_v<Element, E2M1>)
        encode_row_pair<E, kStochastic>(
            x + r * kUnit + i, x + (r + 1) * kUnit + i, encode + i,
            [&](int half, int k) { return byte(r + half, i + k * kLanes); }, codes + i);
      else
        encode_float8<E, Element, kStochastic>(
            x + r * kUnit + i, [&](int k) { return load<F32>(encode + i + k * kLanes); },
            [&](int k) { return byte(r, i + k * kLanes); }, codes + i);
}

/// Rows of codes [lines][kUnit] to the K-major result, of which `bytes` a column are wanted, `stride` apart.
JLP_RULE void store_transposed(const uint8_t (*codes)[kUnit], int lines, int columns, uint8_t* data, int64_t bytes,
                               int64_t stride) {
  alignas(64) uint8_t out[16][kColumnTileRows];
  for (int column = 0; column < columns; column += 16) {
    for (int line = 0; line < lines; line += 16) transpose_bytes(&codes[line][column], kUnit, &out[0][line], sizeof out[0]);
    for (int c = 0; c < std::min(16, columns - column); ++c) {
      uint8_t* to = data + (column + c) * stride;
      if (bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0)
        for (int64_t line = 0; line < bytes; line += 64) stream_line(to + line, out[c] + line);
      else
        memcpy(to, out[c], bytes);
    }
  }
}

/// One operation on one matrix of the batch: from which elements, to which, rounded how.
template <class E, class Element, bool kStochastic>
struct QuantizeBlocks {
  using Storage = typename E::Storage;
  using Tile = BlockTile<E>;
  static constexpr bool kPacked = std::is_same_v<Element, E2M1>;
  static constexpr int64_t kRunElements = 32 * 1024;

  // Chunks: tiles where columns or square blocks are wanted, runs of rows otherwise.

  static bool by_tiles(const QuantizeProblem& p) { return p.format.tiles || p.columnwise.data; }

  /// Without random bits, whole blocks need not know their row.
  static bool flat(const QuantizeProblem& p) { return !kStochastic && p.columns % p.format.block == 0; }

  static int64_t chunks_per_matrix(const QuantizeProblem& p) {
    if (by_tiles(p)) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kUnit);
    if (flat(p)) return divide_up(p.rows * p.columns, kRunElements);
    return divide_up(p.rows, rows_per_run(p));
  }
  static int64_t rows_per_run(const QuantizeProblem& p) {
    return std::max<int64_t>(1, kRunElements / std::max<int64_t>(p.columns, 1));
  }

  static void chunk(const QuantizeProblem& p, int64_t batch, int64_t chunk) {
    QuantizeProblem wanted = p;
    if (p.format.scaling == Scaling::kTensor) {
      start_tensor(wanted, wanted.rowwise, batch, chunk);
      start_tensor(wanted, wanted.columnwise, batch, chunk);
    }
    if (!wanted.rowwise.data && !wanted.columnwise.data) return;
    if (!by_tiles(p)) return run(wanted, batch, chunk);
    const int64_t across = divide_up(p.columns, kUnit);
    tile(wanted, batch, chunk / across * kColumnTileRows, chunk % across * kUnit);
  }

 private:
  /// The first chunk stores a tensor's scale. A tensor without one decodes to NaN everywhere, and the direction is done.
  static void start_tensor(const QuantizeProblem& p, QuantizeDirection& direction, int64_t batch, int64_t chunk) {
    if (!direction.data) return;
    const float encode = BlockContext(p, direction, batch).tensor_encode, decode = float8_decode_scale(encode);
    if (chunk == 0) memcpy(direction.scale + batch * sizeof decode, &decode, sizeof decode);
    if (encode == encode) return;
    if (chunk == 0) memset(direction.data + batch * p.rows * p.columns, 0, p.rows * p.columns);
    direction.data = nullptr;
  }

  /// A run of whole rows, or of elements where rows do not matter.
  static void run(const QuantizeProblem& p, int64_t batch, int64_t chunk) {
    const BlockContext context(p, p.rowwise, batch);
    const int64_t row_bytes = p.format.row_bytes(p.columns), row_scale_bytes = row_scales(p);
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    uint8_t* data = p.rowwise.data + batch * p.rows * row_bytes;
    uint8_t* scale = p.rowwise.scale + batch * p.rows * row_scale_bytes;
    if (flat(p)) {
      const int64_t first = chunk * kRunElements, count = std::min(kRunElements, p.rows * p.columns - first);
      return quantize_blocks_of_row<E, Element, kStochastic>(x + first, count, context, 0, nullptr,
                                                             data + code_bytes<Element>(first),
                                                             scale + first / p.format.block * context.scales.bytes());
    }
    const int64_t step = rows_per_run(p);
    for (int64_t row = chunk * step; row < std::min((chunk + 1) * step, p.rows); ++row)
      quantize_blocks_of_row<E, Element, kStochastic>(x + row * p.columns, p.columns, context,
                                                      kStochastic ? context.random.rows[row] : 0, context.random.groups,
                                                      data + row * row_bytes, scale + row * row_scale_bytes);
  }
  /// Bytes of the scales of a row.
  static int64_t row_scales(const QuantizeProblem& p) { return p.format.scale_columns(p.columns) * p.format.scale_bytes(); }

  /// A tile of up to 128 rows by kUnit columns, in the wanted directions.
  static void tile(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column) {
    const bool rowwise = p.rowwise.data, columnwise = p.columnwise.data;
    const BlockContext context(p, columnwise ? p.columnwise : p.rowwise, batch);
    Tile& t = *reinterpret_cast<Tile*>(thread_scratch(sizeof(Tile)));
    new (&t.input) Staged<E, kColumnTileRows, kUnit>(static_cast<const Storage*>(p.x) + batch * p.rows * p.columns, p.rows,
                                                     p.columns, row, column);
    if (columnwise || context.is_shared()) t.compute(context);
    if (p.format.tiles) store_tile_scales(p, context, t, batch, row, column);
    if (rowwise) tile_rows(p, t, batch, row, column);
    if (!columnwise) return;
    // To nearest, a block that both directions share has the same codes in both.
    const bool made = !kPacked && !kStochastic && rowwise && context.is_shared() && same_tensor(p, batch);
    if (!made) encode_tile_columns(context, t, row, column);
    const int lines = static_cast<int>(code_bytes<Element>(divide_up(t.input.rows, 32) * 32));
    const int64_t stride = p.format.row_bytes(p.rows);
    uint8_t* data = p.columnwise.data + (batch * p.columns + column) * stride + code_bytes<Element>(row);
    store_transposed(t.codes, lines, t.input.columns, data, p.format.row_bytes(t.input.rows), stride);
    if (!context.is_shared()) store_column_scales(p, context, t, batch, row, column);
  }

  static bool same_tensor(const QuantizeProblem& p, int64_t batch) {
    return p.format.tiles || p.rowwise.tensor[batch] == p.columnwise.tensor[batch];
  }

  /// The rowwise half of a tile.
  static void tile_rows(const QuantizeProblem& p, Tile& t, int64_t batch, int64_t row, int64_t column) {
    constexpr int kSpanRows = kSpan / kUnitGroups;
    const BlockContext context(p, p.rowwise, batch);
    const int64_t granules = divide_up(t.input.columns, kBlock);
    alignas(64) uint32_t ids[kUnitGranules] = {};
    if (kStochastic) memcpy(ids, context.random.groups + column / kBlock, granules * sizeof *ids);
    BlockSpan span;
    RandomSpan<kStochastic> random;
    for (int first = 0; first < t.input.rows; first += kSpanRows) {
      const int count = std::min(kSpanRows, t.input.rows - first), groups = count * kUnitGroups;
      if (p.format.tiles)
        take_tile_factors(t, context, first, count, span);
      else
        span.template compute<E>(t.input.x[first], groups, context);
      for (int g = 0; kStochastic && g < groups; ++g)
        random_row_group(context.random, context.random.rows[row + first + g / kUnitGroups], ids + g % kUnitGroups * kLanes,
                         random.bytes[g]);
      uint8_t* codes = t.codes[0] + code_bytes<Element>(first * kUnit);
      encode_span<E, Element, kStochastic>(t.input.x[first], groups, span, random, context, codes);
      for (int r = 0; r < count; ++r)
        store_row(p, context, t, batch, row + first + r, column, codes + code_bytes<Element>(r * kUnit),
                  span.scale + r * (kUnit / p.format.block) * context.scales.bytes());
    }
  }

  static void store_row(const QuantizeProblem& p, const BlockContext& context, const Tile& t, int64_t batch, int64_t row,
                        int64_t column, const uint8_t* codes, const uint8_t* scale) {
    const int64_t line = batch * p.rows + row;
    memcpy(p.rowwise.data + line * p.format.row_bytes(p.columns) + code_bytes<Element>(column), codes,
           p.format.row_bytes(t.input.columns));
    if (context.is_shared()) return;
    memcpy(p.rowwise.scale + line * row_scales(p) + column / p.format.block * context.scales.bytes(), scale,
           p.format.blocks(t.input.columns) * context.scales.bytes());
  }

  /// Factors of the granules of `count` rows of a tile of square blocks.
  static void take_tile_factors(const Tile& t, const BlockContext& context, int first, int count, BlockSpan& span) {
    span.finite = t.finite;
    float* encode = span.encode;
    for (int r = first; r < first + count; ++r)
      for (int i = 0; i < kUnit; i += kBlock) *encode++ = t.encode[r / context.format.block][i];
  }

  /// The codes of a tile for the columnwise direction.
  static void encode_tile_columns(const BlockContext& context, Tile& t, int64_t row, int64_t column) {
    const int block = Tile::block_rows(context);
    alignas(64) uint32_t ids[kUnit] = {}, words[4][kUnit];
    if (kStochastic) memcpy(ids, context.random.rows + column, t.input.columns * sizeof *ids);
    for (int r = 0; r < t.input.rows; r += kBlock) {
      for (int i = 0; kStochastic && i < t.input.columns; i += kLanes) {
        U32 random[4];
        random_columns(context.random, load<U32>(ids + i), context.random.groups[(row + r) / kBlock], random);
        for (int w = 0; w < 4; ++w) store(&words[w][i], random[w]);
      }
      encode_columns_of_granule<E, Element, kStochastic>(t.input.x[r], t.encode[r / block], words, t.input.columns,
                                                         t.codes[code_bytes<Element>(r)]);
    }
    const int rest = t.input.rows % 32;  // packed codes fill their last block
    if (kPacked && rest > 0 && rest <= kBlock) memset(t.codes[(t.input.rows - rest + kBlock) / 2], 0, 8 * kUnit);
    if (__builtin_expect(t.finite, 1)) return;
    if (context.is_tensor()) return write_nan_codes<E>(t.input.x[0], t.input.rows * kUnit, t.codes[0]);
    for (int r = 0; r < divide_up(t.input.rows, kBlock) * kBlock; ++r)
      for (int i = 0; i < t.input.columns; ++i)
        if (t.encode[r / block][i] != t.encode[r / block][i]) t.codes[code_bytes<Element>(r)][i] = 0;
  }

  static void store_column_scales(const QuantizeProblem& p, const BlockContext& context, const Tile& t, int64_t batch,
                                  int64_t row, int64_t column) {
    const int64_t down = p.format.blocks(p.rows), bytes = context.scales.bytes();
    uint8_t* to = p.columnwise.scale + ((batch * p.columns + column) * down + row / p.format.block) * bytes;
    for (int c = 0; c < t.input.columns; ++c, to += down * bytes)
      for (int b = 0; b < t.blocks_down(context); ++b) memcpy(to + b * bytes, &t.scale[b][c], bytes);
  }

  /// Scales of square blocks: the columnwise ones are the transposed.
  static void store_tile_scales(const QuantizeProblem& p, const BlockContext& context, const Tile& t, int64_t batch,
                                int64_t row, int64_t column) {
    const int block = p.format.block;
    const int64_t across = p.format.blocks(p.columns), down = p.format.blocks(p.rows), bytes = context.scales.bytes();
    for (int b = 0; b < t.blocks_down(context); ++b)
      for (int i = 0; i < t.input.columns; i += block) {
        const int64_t tile_row = row / block + b, tile_column = (column + i) / block;
        if (p.rowwise.data)
          memcpy(p.rowwise.scale + ((batch * down + tile_row) * across + tile_column) * bytes, &t.scale[b][i], bytes);
        if (p.columnwise.data)
          memcpy(p.columnwise.scale + ((batch * across + tile_column) * down + tile_row) * bytes, &t.scale[b][i], bytes);
      }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
