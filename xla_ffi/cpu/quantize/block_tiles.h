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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
