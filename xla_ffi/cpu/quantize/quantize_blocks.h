// Quantisation to MXFP8, MXFP4, Float8Block and Float8Tensor: along rows, along columns, or both in one pass over the input
// (numerics.md 1 and 4 to 7). Where both directions have the same codes they are made once.
// Bytes moved per element: the input once (twice with a tensor's amax), 1 or 1/2 written a direction.
#pragma once

#include <new>

#include "../kernels.h"
#include "block_rows.h"
#include "block_tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

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
