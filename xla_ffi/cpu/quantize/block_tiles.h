// Tiles of MXFP8, MXFP4, Float8Block and Float8Tensor: 128 rows are staged, the maxima of columns are vertical, and codes
// are made row by row, each column with its own factor, then transposed 16 by 16 bytes into lines of the K-major result.
#pragma once

#include "amax.h"
#include "block_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kTileBlocks = kColumnTileRows / 32;  // most blocks down a tile

/// A tile and what is made of it; it lies in the thread's scratch memory.
template <class E>
struct BlockTile {
  int64_t batch, row, column;  // its place
  Ahead<E> ahead;              // the tile to its right, if the same chunk has one, to be fetched while codes are made
  Staged<E, kColumnTileRows, kUnit> input;
  alignas(64) uint8_t codes[kColumnTileRows][kUnit];
  alignas(64) uint32_t amax[kTileBlocks][kUnit];  // of columns, a block of rows each
  alignas(64) uint32_t scale[kTileBlocks][kUnit];
  alignas(64) float encode[kTileBlocks][kUnit];
  bool finite;

  BlockTile(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column, bool more)
      : batch(batch),
        row(row),
        column(column),
        ahead(next(matrix(p, batch), p, more)),
        input(matrix(p, batch), p.rows, p.columns, row, column) {}
  /// Whose elements are still to be stored. `source`: the matrix that they are made of.
  BlockTile(const typename E::Storage* source, const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column)
      : batch(batch),
        row(row),
        column(column),
        ahead(next(source, p, column + kUnit < p.columns)),
        input(p.rows, p.columns, row, column) {}

  Ahead<E> next(const typename E::Storage* matrix, const QuantizeProblem& p, bool more) const {
    return more ? Ahead<E>{matrix + row * p.columns + column + kUnit, p.columns} : Ahead<E>{input.x[0], kUnit};
  }
  static const typename E::Storage* matrix(const QuantizeProblem& p, int64_t batch) {
    return static_cast<const typename E::Storage*>(p.x) + batch * p.rows * p.columns;
  }

  /// How many rows share a scale of a column, as far as a tile can see.
  static int block_rows(const BlockContext& context) { return context.is_tensor() ? kColumnTileRows : context.format.block; }
  int blocks_down(const BlockContext& context) const { return static_cast<int>(divide_up(input.rows, block_rows(context))); }

  /// Scales and factors of all columns: of their own blocks, of square tiles, or the tensor's.
  __attribute__((noinline)) void compute(const BlockContext& context) {
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
    for (int c = 0; c < input.columns; ++c) {
      uint8_t* to = p.columnwise.scale + (batch * p.columns + column + c) * stride + first * bytes;
      if (context.scales.e8m0)
        for (int b = 0; b < blocks; ++b) to[b] = static_cast<uint8_t>(scale[b][c]);
      else
        memcpy(to, &scale[0][c], 4);
    }
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

/// Random words of 16 rows of columns. Not inlined: all formats and types of elements share it.
__attribute__((noinline)) static void random_words(const Random& random, const uint32_t* columns, uint32_t block, int count,
                                                   uint32_t (*words)[kUnit]) {
  const RandomKey key(random);
  for (int i = 0; i < count; i += kLanes) {
    U32 four[4];
    random_columns(key, load<U32>(columns + i), block, four);
    for (int w = 0; w < 4; ++w) store(&words[w][i], four[w]);
  }
}

/// 16 rows of a tile, each column with its own factor. `random` has four words a column: byte r of them is row r's.
template <class E, class Element, bool kStochastic, bool kExponents>
void encode_columns_of_granule_by(const typename E::Storage* x, const float* encode, const uint32_t (*random)[kUnit],
                                  int columns, const Ahead<E>& ahead, uint8_t* codes) {
  const auto byte = [&](int row, int column) {
    return kStochastic ? (load<U32>(&random[row / 4][column]) >> (8 * (row % 4))) & 0xFFu : U32{};
  };
  constexpr int kStep = Element::kPacked ? 2 : 1;
  alignas(64) int16_t offsets[kUnit];
  for (int i = 0; kExponents && i < kUnit; ++i) offsets[i] = exponent_offset<Element>(encode[i]);
  for (int r = 0; r < kBlock; r += kStep, codes += kUnit) {
    for (int g = r * kUnitPackets; g < (r + kStep) * kUnitPackets; ++g) ahead.fetch(g);
    for (int i = 0; i < columns; i += 4 * kLanes) {
      const typename E::Storage *row = x + r * kUnit + i, *next = row + kUnit;
      if constexpr (kStep == 2 && kExponents) {
        encode_row_pair_by_exponent(row, next, offsets + i, codes + i);
      } else if constexpr (kStep == 2) {
        encode_row_pair<E, kStochastic>(
            row, next, encode + i, [&](int half, int k) { return byte(r + half, i + k * kLanes); }, codes + i);
      } else {
        if constexpr (kExponents)
          if (encode_float8_by_exponent<Element>(row, load<I16>(offsets + i), load<I16>(offsets + i + 2 * kLanes),
                                                 codes + i))
            continue;
        encode_float8<E, Element, kStochastic>(
            row, [&](int k) { return load<F32>(encode + i + k * kLanes); }, [&](int k) { return byte(r, i + k * kLanes); },
            codes + i);
      }
    }
  }
}

template <class E, class Element, bool kStochastic>
void encode_columns_of_granule(const typename E::Storage* x, const float* encode, const uint32_t (*random)[kUnit],
                               int columns, const BlockContext& context, const Ahead<E>& ahead, uint8_t* codes) {
  with_exponents<E, kStochastic>(context.powers_of_two(), [&](auto exponents) {
    encode_columns_of_granule_by<E, Element, kStochastic, exponents>(x, encode, random, columns, ahead, codes);
  });
}

template <class E, class Element, bool kStochastic>
constexpr BlockEncoder<E> kBlockEncoder = {Element::kPacked, kStochastic, encode_span<E, Element, kStochastic>,
                                           encode_columns_of_granule<E, Element, kStochastic>};

/// A piece of a line of the result: past the caches where it is whole cache lines.
JLP_RULE void store_codes(uint8_t* to, const uint8_t* codes, int64_t bytes) {
  if (bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0)
    for (int64_t line = 0; line < bytes; line += 64) stream_line(to + line, codes + line);
  else
    memcpy(to, codes, bytes);
}

/// Transposes rows of codes [lines][kUnit] into the K-major result: `bytes` per column, columns `stride` bytes apart.
__attribute__((noinline)) static void store_transposed(const uint8_t (*codes)[kUnit], int lines, int columns, uint8_t* data,
                                                       int64_t bytes, int64_t stride) {
  alignas(64) uint8_t out[16][kColumnTileRows];
  for (int column = 0; column < columns; column += 16) {
    for (int line = 0; line < lines; line += 16) transpose_bytes(&codes[line][column], kUnit, &out[0][line], sizeof out[0]);
    for (int c = 0; c < std::min(16, columns - column); ++c) store_codes(data + (column + c) * stride, out[c], bytes);
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
