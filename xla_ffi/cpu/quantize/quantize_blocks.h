// Quantisation to MXFP8, MXFP4, Float8Block and Float8Tensor: along rows, along columns, or both in one pass over the input
// (numerics.md 1 and 4 to 7). Where both directions have the same codes they are made once.
// Bytes moved per element: the input once (twice with a tensor's amax), 1 or 1/2 written a direction.
#pragma once

#include <new>

#include "../kernels.h"
#include "block_rows.h"
#include "gather_amaxes.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Tiles of MXFP8, MXFP4, Float8Block and Float8Tensor: 128 rows are staged, the maxima of columns are vertical, and codes
// are made row by row, each column with its own factor, then transposed 16 by 16 bytes into lines of the K-major result.

constexpr int kTileBlocks = kColumnTileRows / 32;  // most blocks down a tile

/// A tile and what is made of it; it lies in the thread's scratch memory.
template <class E>
struct BlockTile {
  int64_t batch, row, column;  // its place
  UnitsAhead<E> ahead;         // the tile to its right, if the same chunk has one, to be fetched while codes are made
  Staged<E, kColumnTileRows, kUnit> input;
  alignas(64) uint8_t codes[kColumnTileRows][kUnit];
  alignas(64) uint32_t amax[kTileBlocks][kUnit];  // of columns, a block of rows each
  alignas(64) uint32_t scale[kTileBlocks][kUnit];
  alignas(64) float encode[kTileBlocks][kUnit];
  bool finite = true;

  BlockTile(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column, bool more)
      : batch(batch),
        row(row),
        column(column),
        ahead(next(matrix(p, batch), p, more)),
        input(matrix(p, batch), p.rows, p.columns, row, column, 0) {}
  /// Whose elements are still to be stored. `source`: the matrix that they are made of; null: others fetch what they need.
  BlockTile(const typename E::Storage* source, const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column)
      : batch(batch),
        row(row),
        column(column),
        ahead(next(source, p, source && column + kUnit < p.columns)),
        input(p.rows, p.columns, row, column) {}

  UnitsAhead<E> next(const typename E::Storage* matrix, const QuantizeProblem& p, bool more) const {
    return more ? UnitsAhead<E>{matrix + row * p.columns + column + kUnit, p.columns} : UnitsAhead<E>{input.x[0], kUnit};
  }
  static const typename E::Storage* matrix(const QuantizeProblem& p, int64_t batch) {
    return static_cast<const typename E::Storage*>(p.x) + batch * p.rows * p.columns;
  }

  /// How many rows share a scale of a column, as far as a tile can see.
  static int block_rows(const BlockContext& context) { return context.is_tensor() ? kColumnTileRows : context.format.block; }
  int blocks_down(const BlockContext& context) const { return static_cast<int>(divide_up(input.rows, block_rows(context))); }

  /// Factors of all columns where they are the tensor's.
  void take_tensor_factors(const BlockContext& context) {
    finite = amax_of<E>(input.x[0], kColumnTileRows * kUnit) < kInfinityBits;
    std::fill_n(encode[0], kUnit, context.tensor_encode);
  }

  /// Scales and factors of all columns for the b-th block of rows: of their own blocks, or of square tiles.
  __attribute__((noinline)) void compute(const BlockContext& context, int b) {
    const int block = context.format.block;
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

  /// Factors of the granules of `count` rows of a tile of square blocks.
  __attribute__((noinline)) void take_tile_factors(const BlockContext& context, int first, int count,
                                                   BlockSpan& span) const {
    span.finite = finite;
    float factors[kUnitGranules];
    for (int r = first; r < first + count; ++r) {
      const int block = context.format.block;
      if (r == first || r % block == 0)
        for (int i = 0; i < kUnitGranules; ++i) factors[i] = encode[r / block][i * kBlock];
      memcpy(span.encode + (r - first) * kUnitGranules, factors, sizeof factors);
    }
  }

  __attribute__((noinline)) void store_column_scales(const QuantizeProblem& p, const BlockContext& context) const {
    const int64_t bytes = context.scales.bytes(), first = row / p.format.block;
    const int64_t stride = p.columnwise.scale_stride ? p.columnwise.scale_stride : p.format.blocks(p.rows) * bytes;
    const int blocks = blocks_down(context);
    const int count = static_cast<int>(context.scales.e8m0 ? blocks : bytes);
    alignas(64) uint32_t words[kUnit];  // of a column: its bytes one after another, or the one float32
    for (int i = 0; i < kUnit; i += kLanes) {
      U32 word = load<U32>(&scale[0][i]);
      for (int b = 1; b < blocks; ++b) word |= load<U32>(&scale[b][i]) << (8 * b);
      store(words + i, word);
    }
    uint8_t* to = p.columnwise.scale + (batch * p.columns + column) * stride + first * bytes;
    if (count == 4)
      for (int c = 0; c < input.columns; ++c) memcpy(to + c * stride, words + c, 4);
    else
      for (int c = 0; c < input.columns; ++c) memcpy(to + c * stride, words + c, count);
  }

  /// Scales of square blocks: the columnwise ones are the transposed.
  __attribute__((noinline)) void store_tile_scales(const QuantizeProblem& p, const BlockContext& context) const {
    const int block = p.format.block;
    const int64_t across = p.format.blocks(p.columns), down = p.format.blocks(p.rows), bytes = context.scales.bytes();
    for (int b = 0; b < blocks_down(context); ++b)
      for (int i = 0; i < input.columns; i += block) {
        const int64_t tile_row = row / block + b, tile_column = (column + i) / block;
        if (p.rowwise.data)
          memcpy(p.rowwise.scale + ((batch * down + tile_row) * across + tile_column) * bytes, &scale[b][i], bytes);
        if (p.columnwise.data)
          memcpy(p.columnwise.scale + ((batch * across + tile_column) * down + tile_row) * bytes, &scale[b][i], bytes);
      }
  }
};

/// Random words of 16 rows of kSquare columns. Not inlined: all formats and types of elements share it.
__attribute__((noinline)) static void random_words(const Random& random, const uint32_t* columns, uint32_t block,
                                                   uint32_t (*words)[kSquare]) {
  const RandomKey key(random);
  for (int i = 0; i < kSquare; i += kLanes) {
    U32 four[4];
    random_columns(key, load<U32>(columns + i), block, four);
    for (int w = 0; w < 4; ++w) store(&words[w][i], four[w]);
  }
}

/// 16 rows of kSquare columns of a tile, each with its own factor. `random` has four words a column: byte r of them is row
/// r's.
template <class E, class Element, bool kStochastic, bool kExponents>
void encode_columns_of_granule_by(const typename E::Storage* x, const float* encode, const uint32_t (*random)[kSquare],
                                  uint8_t* codes) {
  const auto byte = [&](int row, int column) {
    return kStochastic ? (load<U32>(&random[row / 4][column]) >> (8 * (row % 4))) & 0xFFu : U32{};
  };
  constexpr int kStep = Element::kPacked ? 2 : 1;
  alignas(64) int16_t offsets[kSquare];
  for (int i = 0; kExponents && i < kSquare; ++i) offsets[i] = exponent_offset<Element>(encode[i]);
  for (int r = 0; r < kBlock; r += kStep, codes += kUnit) {
    const typename E::Storage *row = x + r * kUnit, *next = row + kUnit;
    if constexpr (kStep == 2 && kExponents) {
      encode_row_pair_by_exponent(row, next, offsets, codes);
    } else if constexpr (kStep == 2) {
      encode_row_pair<E, kStochastic>(row, next, encode, [&](int half, int k) { return byte(r + half, k * kLanes); }, codes);
    } else {
      if constexpr (kExponents)
        if (encode_float8_by_exponent<Element>(row, load<I16>(offsets), load<I16>(offsets + 2 * kLanes), codes)) continue;
      encode_float8<E, Element, kStochastic>(
          row, [&](int k) { return load<F32>(encode + k * kLanes); }, [&](int k) { return byte(r, k * kLanes); }, codes);
    }
  }
}

template <class E, class Element, bool kStochastic>
void encode_columns_of_granule(const typename E::Storage* x, const float* encode, const uint32_t (*random)[kSquare],
                               const BlockContext& context, uint8_t* codes) {
  with_exponents<E, kStochastic>(context.powers_of_two(), [&](auto exponents) {
    encode_columns_of_granule_by<E, Element, kStochastic, exponents>(x, encode, random, codes);
  });
}

template <class E, class Element, bool kStochastic>
constexpr BlockEncoder<E> kBlockEncoder = {Element::kPacked, kStochastic, encode_span<E, Element, kStochastic>,
                                           encode_columns_of_granule<E, Element, kStochastic>};

/// The first chunk stores a tensor's scale. A tensor without one decodes to NaN everywhere, and the direction is done.
__attribute__((noinline)) static void start_tensor(const QuantizeProblem& p, QuantizeDirection& direction, int64_t batch,
                                                   int64_t chunk) {
  if (!direction.data) return;
  const float encode = BlockContext(p, direction, batch).tensor_encode, decode = float8_decode_scale(encode);
  if (chunk == 0) memcpy(direction.scale + batch * sizeof decode, &decode, sizeof decode);
  if (encode == encode) return;
  if (chunk == 0) {
    const bool is_row = &direction == &p.rowwise;
    const int64_t lines = is_row ? p.rows : p.columns, length = is_row ? p.columns : p.rows;
    const int64_t stride = direction.data_stride ? direction.data_stride : length;
    for (int64_t line = batch * lines; line < (batch + 1) * lines; ++line) memset(direction.data + line * stride, 0, length);
  }
  direction.data = nullptr;
}

/// One operation on one matrix of the batch. E is the type of the input; the encoder knows the format and the rounding.
template <class E>
struct QuantizeBlocks {
  using Storage = typename E::Storage;
  using Tile = BlockTile<E>;
  const BlockEncoder<E>& encoder;
  static constexpr int64_t kStripColumns = 4 * kUnit;
  static constexpr int kPart = 32;  // rows of a tile at a time

  // Chunks: strips of tiles where columns or square blocks are wanted, runs of rows otherwise.

  static bool by_tiles(const QuantizeProblem& p) { return p.format.tiles || p.columnwise.data; }

  int64_t chunks_per_matrix(const QuantizeProblem& p) const {
    if (by_tiles(p)) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kStripColumns);
    return RowRuns(p, encoder.stochastic).count();
  }

  void chunk(const QuantizeProblem& p, int64_t batch, int64_t chunk) const {
    QuantizeProblem wanted = p;
    if (p.format.scaling == Scaling::kTensor) {
      start_tensor(wanted, wanted.rowwise, batch, chunk);
      start_tensor(wanted, wanted.columnwise, batch, chunk);
    }
    if (!wanted.rowwise.data && !wanted.columnwise.data) return;
    if (by_tiles(p)) {
      visit_tiles(p, chunk, [&](int64_t row, int64_t column, bool more) {
        auto& t = *new (scratch()) Tile(wanted, batch, row, column, more);
        finish(wanted, t, [&](int first_row, int rows) { t.input.take(first_row, rows); });
      });
    } else {
      const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
      RowRuns(p, encoder.stochastic).visit(chunk, [&](int64_t row, int64_t column, int64_t columns) {
        along_row(wanted, batch, row, column, columns, x + row * p.columns + column);
      });
    }
  }

  // For kernels that make the elements themselves.

  /// The thread's memory for a tile, and `more` bytes after it.
  static uint8_t* scratch(int64_t more = 0) { return thread_scratch(kTileBytes + more); }
  static constexpr int64_t kTileBytes = (sizeof(Tile) + 63) / 64 * 64;

  /// Where the scales of a line from a column on are stored, if they are its own.
  static uint8_t* row_scales(const QuantizeProblem& p, int64_t line, int64_t column) {
    if (p.format.scaling == Scaling::kTensor) return nullptr;
    return p.rowwise.scale + (line * p.format.scale_columns(p.columns) + column / p.format.block) * p.format.scale_bytes();
  }

  /// Calls visit(row, column, whether the tile to its right follows) for the tiles of a chunk.
  template <class Visit>
  static void visit_tiles(const QuantizeProblem& p, int64_t chunk, Visit visit) {
    const int64_t across = divide_up(p.columns, kStripColumns), first = chunk % across * kStripColumns;
    const int64_t row = chunk / across * kColumnTileRows, last = std::min(first + kStripColumns, p.columns);
    for (int64_t column = first; column < last; column += kUnit) visit(row, column, column + kUnit < last);
  }

  /// `columns` elements of a row from `column` on, whole sixteens before them, quantised rowwise.
  void along_row(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column, int64_t columns,
                 const Storage* x) const {
    const BlockContext context(p, p.rowwise, batch);
    const int64_t line = batch * p.rows + row;
    const bool random = encoder.stochastic;
    quantize_blocks_of_row<E>(encoder, x, columns, context, random ? context.random.rows[row] : 0,
                              random ? context.random.sixteens + column / kBlock : nullptr,
                              p.rowwise.data + line * p.format.row_bytes(p.columns) + encoder.code_bytes(column),
                              row_scales(p, line, column));
  }

  /// A tile of up to 128 rows by kUnit columns, in the wanted directions. fill(first, count) stores so many of its rows.
  template <class Fill>
  void finish(const QuantizeProblem& p, Tile& t, Fill fill) const {
    const bool rowwise = p.rowwise.data, columnwise = p.columnwise.data;
    const BlockContext context(p, columnwise ? p.columnwise : p.rowwise, t.batch);
    // To nearest, a block that both directions share has the same codes in both.
    const bool made =
        columnwise && !encoder.packed && !encoder.stochastic && rowwise && context.is_shared() && same_tensor(p, t.batch);
    for (int first = 0; first < t.input.rows; first += kPart) {  // while they are in the nearest cache
      const int rows = std::min(kPart, t.input.rows - first);
      fill(first, rows);
      if (rowwise && !p.format.tiles) tile_rows(p, t, first, rows, made);
      const int block = Tile::block_rows(context), last = first + rows;
      if ((columnwise || p.format.tiles) && !context.is_tensor() && (last % block == 0 || last == t.input.rows))
        t.compute(context, (last - 1) / block);
    }
    if (columnwise && context.is_tensor()) t.take_tensor_factors(context);
    if (p.format.tiles) t.store_tile_scales(p, context);
    if (rowwise && p.format.tiles) tile_rows(p, t, 0, t.input.rows, made);
    if (!columnwise) return;
    const int lines = static_cast<int>(encoder.code_bytes(divide_up(t.input.rows, 32) * 32));
    const int64_t stride = p.columnwise.data_stride ? p.columnwise.data_stride : p.format.row_bytes(p.rows);
    uint8_t* data = p.columnwise.data + (t.batch * p.columns + t.column) * stride + encoder.code_bytes(t.row);
    if (!made) encode_tile_columns(context, t, rowwise);
    store_transposed(t.codes[0], kUnit, lines, t.input.columns, data, p.format.row_bytes(t.input.rows), stride);
    if (!context.is_shared()) t.store_column_scales(p, context);
  }

 private:
  static bool same_tensor(const QuantizeProblem& p, int64_t batch) {
    return p.format.tiles || p.rowwise.tensor[batch] == p.columnwise.tensor[batch];
  }

  /// The rowwise half of `rows` rows of a tile. `keep`: their codes are left in the tile.
  void tile_rows(const QuantizeProblem& p, Tile& t, int from, int rows, bool keep) const {
    constexpr int kSpanRows = kSpan / 2 / kUnitPackets;
    const BlockContext context(p, p.rowwise, t.batch);
    alignas(64) uint32_t ids[kUnitGranules] = {};
    if (encoder.stochastic)
      memcpy(ids, context.random.sixteens + t.column / kBlock, divide_up(t.input.columns, kBlock) * sizeof *ids);
    BlockSpan span;
    RandomSpan random;
    for (int first = from; first < from + rows; first += kSpanRows) {
      const int count = std::min(kSpanRows, from + rows - first), packets = count * kUnitPackets;
      if (p.format.tiles)
        t.take_tile_factors(context, first, count, span);
      else
        span.template compute<E>(t.input.x[first], packets, context);
      if (encoder.stochastic) random.compute(context.random, context.random.rows + t.row + first, count, ids, kUnitPackets);
      uint8_t* codes = t.codes[0] + (keep ? encoder.code_bytes(first * kUnit) : 0);
      encoder.span(t.input.x[first], packets, span, random, context, t.ahead.down(first), codes);
      for (int r = 0; r < count; ++r) store_row(p, context, t, first + r, codes + encoder.code_bytes(r * kUnit), span, r);
    }
  }

  void store_row(const QuantizeProblem& p, const BlockContext& context, const Tile& t, int row, const uint8_t* codes,
                 const BlockSpan& span, int row_of_span) const {
    const int64_t line = t.batch * p.rows + t.row + row;
    uint8_t* data = p.rowwise.data + line * p.format.row_bytes(p.columns) + encoder.code_bytes(t.column);
    store_line(data, codes, p.format.row_bytes(t.input.columns));
    if (context.is_shared()) return;
    constexpr int kScaleBytes = kUnit / 32;  // 4 bytes for 128 elements, or 1 for 32
    uint8_t* scales = row_scales(p, line, t.column);
    if (t.input.columns == kUnit)
      memcpy(scales, span.scale + row_of_span * kScaleBytes, kScaleBytes);
    else
      memcpy(scales, span.scale + row_of_span * kScaleBytes, p.format.blocks(t.input.columns) * context.scales.bytes());
  }

  /// The codes of a tile for the columnwise direction. The next tile is fetched unless it is already.
  void encode_tile_columns(const BlockContext& context, Tile& t, bool fetched) const {
    const int block = Tile::block_rows(context);
    alignas(64) uint32_t ids[kUnit] = {}, words[4][kSquare];
    if (encoder.stochastic) memcpy(ids, context.random.rows + t.column, t.input.columns * sizeof *ids);
    for (int r = 0; r < t.input.rows; r += kBlock)
      for (int i = 0; i < t.input.columns; i += kSquare) {
        if (encoder.stochastic) random_words(context.random, ids + i, context.random.sixteens[(t.row + r) / kBlock], words);
        for (int row = r; !fetched && row < r + kBlock; ++row) t.ahead.fetch_part(row, i, kSquare);
        encoder.columns(&t.input.x[r][i], &t.encode[r / block][i], words, context, &t.codes[encoder.code_bytes(r)][i]);
      }
    const int rest = t.input.rows % 32;  // packed codes fill their last block
    if (encoder.packed && rest > 0 && rest <= kBlock) memset(t.codes[(t.input.rows - rest + kBlock) / 2], 0, 8 * kUnit);
    if (__builtin_expect(t.finite, 1)) return;
    if (context.is_tensor()) return write_nan_codes<E>(t.input.x[0], t.input.rows * kUnit, t.codes[0]);
    for (int r = 0; r < divide_up(t.input.rows, kBlock) * kBlock; ++r)
      for (int i = 0; i < t.input.columns; ++i)
        if (t.encode[r / block][i] != t.encode[r / block][i]) t.codes[encoder.code_bytes(r)][i] = 0;
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
