// Quantisation to MXFP8, MXFP4, Float8Block and Float8Tensor: along rows, along columns, or both in one pass over the input
// (numerics.md 1 and 4 to 7). Where both directions have the same codes they are made once.
// Bytes moved per element: the input once (twice with a tensor's amax), 1 or 1/2 written a direction.
#pragma once

#include <new>

#include "block_rows.h"
#include "block_tiles.h"
#include "kernels.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// One operation on one matrix of the batch: from which elements, to which, rounded how.
template <class E, class Element, bool kStochastic>
struct QuantizeBlocks {
  using Storage = typename E::Storage;
  using Tile = BlockTile<E>;
  static constexpr bool kPacked = std::is_same_v<Element, E2M1>;
  static constexpr int64_t kStripColumns = 4 * kUnit;

  // Chunks: strips of tiles where columns or square blocks are wanted, runs of rows otherwise.

  static bool by_tiles(const QuantizeProblem& p) { return p.format.tiles || p.columnwise.data; }

  static int64_t chunks_per_matrix(const QuantizeProblem& p) {
    if (by_tiles(p)) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kStripColumns);
    return RowRuns(p, kStochastic).count();
  }

  static void chunk(const QuantizeProblem& p, int64_t batch, int64_t chunk) {
    QuantizeProblem wanted = p;
    if (p.format.scaling == Scaling::kTensor) {
      start_tensor(wanted, wanted.rowwise, batch, chunk);
      start_tensor(wanted, wanted.columnwise, batch, chunk);
    }
    if (!wanted.rowwise.data && !wanted.columnwise.data) return;
    if (!by_tiles(p)) return run(wanted, batch, chunk);
    const int64_t across = divide_up(p.columns, kStripColumns), first = chunk % across * kStripColumns;
    for (int64_t column = first; column < std::min(first + kStripColumns, p.columns); column += kUnit)
      tile(wanted, batch, chunk / across * kColumnTileRows, column, column + kUnit < first + kStripColumns);
  }

 private:
  /// The first chunk stores a tensor's scale. A tensor without one decodes to NaN everywhere, and the direction is done.
  static void start_tensor(const QuantizeProblem& p, QuantizeDirection& direction, int64_t batch, int64_t chunk) {
    if (!direction.data) return;
    const float encode = BlockContext(p, direction, batch).tensor_encode, decode = float8_decode_scale(encode);
    if (chunk == 0) memcpy(direction.scale + batch * sizeof decode, &decode, sizeof decode);
    if (encode == encode) return;
    if (chunk == 0) {
      const bool is_row = &direction == &p.rowwise;
      const int64_t lines = is_row ? p.rows : p.columns, length = is_row ? p.columns : p.rows;
      const int64_t stride = direction.data_stride ? direction.data_stride : length;
      for (int64_t line = batch * lines; line < (batch + 1) * lines; ++line)
        memset(direction.data + line * stride, 0, length);
    }
    direction.data = nullptr;
  }

  static void run(const QuantizeProblem& p, int64_t batch, int64_t chunk) {
    const BlockContext context(p, p.rowwise, batch);
    const int64_t row_bytes = p.format.row_bytes(p.columns);
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    uint8_t* data = p.rowwise.data + batch * p.rows * row_bytes;
    RowRuns(p, kStochastic).visit(chunk, [&](int64_t row, int64_t column, int64_t columns) {
      quantize_blocks_of_row<E, Element, kStochastic>(
          x + row * p.columns + column, columns, context, kStochastic ? context.random.rows[row] : 0, context.random.groups,
          data + row * row_bytes + code_bytes<Element>(column), row_scales(p, batch * p.rows + row, column));
    });
  }
  /// Where the scales of a line from a column on are stored, if they are its own.
  static uint8_t* row_scales(const QuantizeProblem& p, int64_t line, int64_t column) {
    if (p.format.scaling == Scaling::kTensor) return nullptr;
    return p.rowwise.scale + (line * p.format.scale_columns(p.columns) + column / p.format.block) * p.format.scale_bytes();
  }

  /// A tile of up to 128 rows by kUnit columns, in the wanted directions.
  static void tile(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column, bool more) {
    const bool rowwise = p.rowwise.data, columnwise = p.columnwise.data;
    const BlockContext context(p, columnwise ? p.columnwise : p.rowwise, batch);
    Tile& t = *new (thread_scratch(sizeof(Tile))) Tile(p, batch, row, column, more);
    if (columnwise || p.format.tiles) t.compute(context);
    if (p.format.tiles) store_tile_scales(p, context, t);
    if (rowwise) tile_rows(p, t);
    if (!columnwise) return;
    // To nearest, a block that both directions share has the same codes in both.
    const bool made = !kPacked && !kStochastic && rowwise && context.is_shared() && same_tensor(p, batch);
    if (!made) encode_tile_columns(context, t);
    const int lines = static_cast<int>(code_bytes<Element>(divide_up(t.input.rows, 32) * 32));
    const int64_t stride = p.columnwise.data_stride ? p.columnwise.data_stride : p.format.row_bytes(p.rows);
    uint8_t* data = p.columnwise.data + (batch * p.columns + column) * stride + code_bytes<Element>(row);
    store_transposed(t.codes, lines, t.input.columns, data, p.format.row_bytes(t.input.rows), stride);
    if (!context.is_shared()) store_column_scales(p, context, t);
  }

  static bool same_tensor(const QuantizeProblem& p, int64_t batch) {
    return p.format.tiles || p.rowwise.tensor[batch] == p.columnwise.tensor[batch];
  }

  /// The rowwise half of a tile.
  static void tile_rows(const QuantizeProblem& p, Tile& t) {
    constexpr int kSpanRows = kSpan / kUnitGroups;
    const BlockContext context(p, p.rowwise, t.batch);
    alignas(64) uint32_t ids[kUnitGranules] = {};
    if (kStochastic)
      memcpy(ids, context.random.groups + t.column / kBlock, divide_up(t.input.columns, kBlock) * sizeof *ids);
    BlockSpan span;
    RandomSpan<kStochastic> random;
    for (int first = 0; first < t.input.rows; first += kSpanRows) {
      const int count = std::min(kSpanRows, t.input.rows - first), groups = count * kUnitGroups;
      if (p.format.tiles)
        take_tile_factors(t, context, first, count, span);
      else
        span.template compute<E>(t.input.x[first], groups, context);
      for (int g = 0; kStochastic && g < groups; ++g)
        random_row_group(context.random, context.random.rows[t.row + first + g / kUnitGroups],
                         ids + g % kUnitGroups * kLanes, random.bytes[g]);
      uint8_t* codes = t.codes[0] + code_bytes<Element>(first * kUnit);
      encode_span<E, Element, kStochastic>(t.input.x[first], groups, span, random, context, t.ahead.down(first), codes);
      for (int r = 0; r < count; ++r) store_row(p, context, t, first + r, codes + code_bytes<Element>(r * kUnit), span, r);
    }
  }

  static void store_row(const QuantizeProblem& p, const BlockContext& context, const Tile& t, int row, const uint8_t* codes,
                        const BlockSpan& span, int row_of_span) {
    const int64_t line = t.batch * p.rows + t.row + row;
    uint8_t* data = p.rowwise.data + line * p.format.row_bytes(p.columns) + code_bytes<Element>(t.column);
    store_codes(data, codes, p.format.row_bytes(t.input.columns));
    if (context.is_shared()) return;
    constexpr int kScaleBytes = kUnit / 32;  // 4 bytes for 128 elements, or 1 for 32
    uint8_t* scales = row_scales(p, line, t.column);
    if (t.input.columns == kUnit)
      memcpy(scales, span.scale + row_of_span * kScaleBytes, kScaleBytes);
    else
      memcpy(scales, span.scale + row_of_span * kScaleBytes, p.format.blocks(t.input.columns) * context.scales.bytes());
  }

  /// Factors of the granules of `count` rows of a tile of square blocks.
  static void take_tile_factors(const Tile& t, const BlockContext& context, int first, int count, BlockSpan& span) {
    span.finite = t.finite;
    float* encode = span.encode;
    for (int r = first; r < first + count; ++r)
      for (int i = 0; i < kUnit; i += kBlock) *encode++ = t.encode[r / context.format.block][i];
  }

  /// The codes of a tile for the columnwise direction.
  static void encode_tile_columns(const BlockContext& context, Tile& t) {
    const int block = Tile::block_rows(context);
    alignas(64) uint32_t ids[kUnit] = {}, words[4][kUnit];
    if (kStochastic) memcpy(ids, context.random.rows + t.column, t.input.columns * sizeof *ids);
    for (int r = 0; r < t.input.rows; r += kBlock) {
      for (int i = 0; kStochastic && i < t.input.columns; i += kLanes) {
        U32 random[4];
        random_columns(context.random, load<U32>(ids + i), context.random.groups[(t.row + r) / kBlock], random);
        for (int w = 0; w < 4; ++w) store(&words[w][i], random[w]);
      }
      with_exponents<E, kStochastic>(context.powers_of_two(), [&](auto exponents) {
        encode_columns_of_granule<E, Element, kStochastic, exponents>(
            t.input.x[r], t.encode[r / block], words, t.input.columns, t.ahead.down(r), t.codes[code_bytes<Element>(r)]);
      });
    }
    const int rest = t.input.rows % 32;  // packed codes fill their last block
    if (kPacked && rest > 0 && rest <= kBlock) memset(t.codes[(t.input.rows - rest + kBlock) / 2], 0, 8 * kUnit);
    if (__builtin_expect(t.finite, 1)) return;
    if (context.is_tensor()) return write_nan_codes<E>(t.input.x[0], t.input.rows * kUnit, t.codes[0]);
    for (int r = 0; r < divide_up(t.input.rows, kBlock) * kBlock; ++r)
      for (int i = 0; i < t.input.columns; ++i)
        if (t.encode[r / block][i] != t.encode[r / block][i]) t.codes[code_bytes<Element>(r)][i] = 0;
  }

  static void store_column_scales(const QuantizeProblem& p, const BlockContext& context, const Tile& t) {
    const int64_t bytes = context.scales.bytes(), first = t.row / p.format.block;
    const int64_t stride = p.columnwise.scale_stride ? p.columnwise.scale_stride : p.format.blocks(p.rows) * bytes;
    const int blocks = t.blocks_down(context);
    for (int c = 0; c < t.input.columns; ++c) {
      uint8_t* scale = p.columnwise.scale + (t.batch * p.columns + t.column + c) * stride + first * bytes;
      if (context.scales.e8m0)
        for (int b = 0; b < blocks; ++b) scale[b] = static_cast<uint8_t>(t.scale[b][c]);
      else
        memcpy(scale, &t.scale[0][c], 4);
    }
  }

  /// Scales of square blocks: the columnwise ones are the transposed.
  static void store_tile_scales(const QuantizeProblem& p, const BlockContext& context, const Tile& t) {
    const int block = p.format.block;
    const int64_t across = p.format.blocks(p.columns), down = p.format.blocks(p.rows), bytes = context.scales.bytes();
    for (int b = 0; b < t.blocks_down(context); ++b)
      for (int i = 0; i < t.input.columns; i += block) {
        const int64_t tile_row = t.row / block + b, tile_column = (t.column + i) / block;
        if (p.rowwise.data)
          memcpy(p.rowwise.scale + ((t.batch * down + tile_row) * across + tile_column) * bytes, &t.scale[b][i], bytes);
        if (p.columnwise.data)
          memcpy(p.columnwise.scale + ((t.batch * across + tile_column) * down + tile_row) * bytes, &t.scale[b][i], bytes);
      }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
