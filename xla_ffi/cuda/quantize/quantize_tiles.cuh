// Quantisation along columns, or along both at once, or in square blocks: one pass over tiles of 128 x 128 elements.
//
//   elements -> shared memory (16-byte copies in the background; zeros beyond the matrix)
//   square blocks: maxima of 16 x 16 by pairs of columns -> of blocks by atomics in shared memory -> scales
//   rows: a thread takes 16 elements of a row, 8 threads a row -> scale -> codes straight to memory
//   columns: a thread takes 2 x 16 rows of a pair of columns -> rotation -> scales -> codes to shared memory, so that the
//     K-major lines leave in 64 (4-bit) or 128 consecutive bytes
//
// Bytes moved per element: 2 or 4 read; a direction, 1/2 or 1 written and the scales (1/16 NVFP4, 1/32 MX and Float8Block,
// 1/block of that for square blocks).
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles from the matrices' end; the
// next tile's elements are on their way while the codes of the columns leave.
#pragma once

#include "eden.cuh"
#include "rotate.cuh"

namespace jaxlowprec {
namespace cuda {

/// The codes of 16 rows of a column: what is stored at once.
template <class Code>
struct alignas(4 * kCodeWords<Code>) CodePiece {
  uint32_t words[kCodeWords<Code>];
};

/// Where the codes of 16 rows of a column lie among a tile's. Even columns come first, and pieces are permuted, so that
/// neither the threads of neighbouring pairs nor those of neighbouring pieces meet in a bank.
template <class Code>
JLP_DEVICE int column_piece(int column, int rows_16) {
  const int pair = column / 2, line = pair + column % 2 * kTilePairs;
  const int turn = (kCodeWords<Code> == 2 ? pair / 2 : pair) % kTileSixteens;
  return line * kTileSixteens + (rows_16 ^ turn);
}

/// Where a tile begins in the matrices.
struct TileCorner {
  uint32_t batch;
  int64_t row, column;
  int rows_left, columns_left;  // of the matrix, at most kTile

  /// Of a whole tile.
  JLP_DEVICE TileCorner of_whole(const TilePlace& at) {
    return {at.batch, static_cast<int64_t>(at.down) * kTile, static_cast<int64_t>(at.across) * kTile, kTile, kTile};
  }
  /// Of a tile of matrices of so many rows and columns.
  JLP_DEVICE TileCorner of(const TilePlace& at, int64_t rows, int64_t columns) {
    const int64_t row = static_cast<int64_t>(at.down) * kTile, column = static_cast<int64_t>(at.across) * kTile;
    return {at.batch, row, column, left(rows, row, kTile), left(columns, column, kTile)};
  }
};

/// The codes of a tile's columns from shared memory to their lines, of which matrices have `columns`.
template <class Code>
JLP_DEVICE void store_column_codes(const TileCorner& at, int64_t columns, const DirectionArguments& direction,
                                   const CodePiece<Code>* pieces) {
  constexpr int kCodeBytes = 4 * kCodeWords<Code>;
  const int down = threadIdx.x % kTileSixteens;
  const int64_t offset = code_bytes<Code>(at.row + 16 * down);
  const int bytes = left(direction.row_bytes, offset, kCodeBytes);
  // A thread has every 32nd line of the pieces: two even columns, then the odd ones beside them.
  constexpr int kLines = kTileThreads / kTileSixteens;
  static_assert(kTilePairs == 2 * kLines && kLines % (2 * kTileSixteens) == 0, "a thread's pieces have one permutation");
  const int first = 2 * (threadIdx.x / kTileSixteens);
  uint8_t* const data = direction.data + (at.batch * columns + at.column + first) * direction.row_bytes + offset;
  const CodePiece<Code>* const codes = pieces + column_piece<Code>(first, down);
  if (direction.pieces && bytes == kCodeBytes && at.columns_left == kTile) {
#pragma unroll
    for (int i = 0; i < kTile / kLines; ++i)
      store_codes(data + (i % 2 * 2 * kLines + i / 2) * direction.row_bytes, kCodeBytes, true,
                  codes[i * kLines * kTileSixteens].words);
  } else {
#pragma unroll 1
    for (int i = 0; i < kTile / kLines; ++i) {
      const int further = i % 2 * 2 * kLines + i / 2;
      if (first + further < at.columns_left)
        store_codes(data + further * direction.row_bytes, bytes, direction.pieces, codes[i * kLines * kTileSixteens].words);
    }
  }
}

/// kTiles: of different matrices, which are quantised alike.
template <class E, class Code, Scales kScales, bool kStochastic, int kTiles = 1>
struct TilesShared {
  Tile<E> tiles[kTiles];
  CodePiece<Code> codes[kTile * kTileSixteens];
  uint8_t column_scales[kTile][kTileSixteens];
  float square_encode[kTileSixteens][kTileSixteens];
  uint32_t square_amax[kTileSixteens][kTileSixteens];  // of its first sixteen in both directions, for a block
  Matrix<kScales> matrices[2];                         // rowwise and columnwise, as the tables
  EncodeTable tables[kIsTwoLevel<kScales> ? 2 : 1];
  RoundKeys<kStochastic> row_keys, column_keys;
  uint32_t column_amax[kIsTwoLevel<kScales> ? 1 : kPairThreads][kTile];
};

/// One kernel's work on one tile.
template <class E, class Code, Scales kScales, bool kStochastic, bool kRotate, int kTiles>
struct TileQuantizer : TileCorner {
  using Shared = TilesShared<E, Code, kScales, kStochastic, kTiles>;
  static constexpr bool kRandomCodes = kStochastic && !kEden<kScales, kStochastic>;
  static constexpr int kCodeBytes = 4 * kCodeWords<Code>;
  const QuantizeArguments& a;
  Shared& shared;
  const Tile<E>& tile;  // one of the shared ones

  /// Threads that share a pair of columns take rows kUnits * 16 apart.
  JLP_DEVICE int pair() { return threadIdx.x % kTilePairs; }
  JLP_DEVICE int unit_sixteen(int unit) { return threadIdx.x / kTilePairs * kUnits + unit; }

  // --- square blocks

  /// The first of the sixteens that share a square block with this one, along either side.
  __device__ __forceinline__ int block_start(int sixteen) const { return sixteen & -sixteens_in_block<kScales>(a); }

  /// Scales of the square blocks: by the whole block of threads, with barriers.
  __device__ __forceinline__ void square_scales(const Matrix<kScales>& matrix, const EncodeTable& table) const {
    const int sixteen = threadIdx.x % kTileSixteens, down = threadIdx.x / kTileSixteens;
    if (down < kTileSixteens) shared.square_amax[down][sixteen] = 0;
    __syncthreads();
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t pairs[Tile<E>::kPairWords];
      tile.load_pair(16 * unit_sixteen(unit), pair(), pairs);
      const uint32_t amax = max_of_lanes(magnitude_bits<E>(pairs), 8);
      if (pair() % 8 == 0) atomicMax(&shared.square_amax[block_start(unit_sixteen(unit))][block_start(pair() / 8)], amax);
    }
    __syncthreads();
    if constexpr (kIsChosen<kScales>) {
#pragma unroll 1
      for (int square = threadIdx.x / 16; square < kTileSixteens * kTileSixteens; square += kTileThreads / 16) {
        const int r = square / kTileSixteens, c = square % kTileSixteens;
        const Sixteen<E> elements = tile.row_sixteen(16 * r + threadIdx.x % 16, c);
        const BlockScale scale = scale_of_square(matrix, elements, square_amax(r, c), table);
        if (threadIdx.x % 16 == 0) keep_square_scale(r, c, scale);
      }
    } else if (down < kTileSixteens) {
      keep_square_scale(down, sixteen, Matrix<kScales>::scale(matrix, a, square_amax(down, sixteen), table));
    }
    __syncthreads();
  }

  /// What the block's elements are multiplied by stays in shared memory; its scale goes to both directions.
  __device__ __forceinline__ void keep_square_scale(int down, int sixteen, const BlockScale& scale) const {
    shared.square_encode[down][sixteen] = scale.encode;
    if (block_start(down) == down && block_start(sixteen) == sixteen && 16 * down < rows_left &&
        16 * sixteen < columns_left) {
      const int64_t r = (row >> log_block<kScales>(a)) + down / sixteens_in_block<kScales>(a);
      const int64_t c = (column >> log_block<kScales>(a)) + sixteen / sixteens_in_block<kScales>(a);
      store_square_scale(a.rowwise, r, c, scale);
      store_square_scale(a.columnwise, c, r, scale);
    }
  }

  __device__ __forceinline__ void store_square_scale(const DirectionArguments& direction, int64_t r, int64_t c,
                                                     const BlockScale& scale) const {
    if (!direction.data) return;
    store_scale<kScales>(a, direction.scale, scale_place<kScales>(direction, batch, r, c), scale.stored);
  }

  __device__ __forceinline__ uint32_t square_amax(int down, int across) const {
    return shared.square_amax[block_start(down)][block_start(across)];
  }

  // --- rows

  __device__ __forceinline__ void rows() const {
    constexpr int kStep = kTileThreads / kTileSixteens;
    const DirectionArguments& direction = a.rowwise;
    const int sixteen = threadIdx.x % kTileSixteens, lanes = sixteens_in_block<kScales>(a);
    const int64_t first = row + threadIdx.x / kTileSixteens, line = batch * a.rows + first;
    const int64_t scale_at = scale_place<kScales>(direction, batch, first, (column + 16 * sixteen) >> log_block<kScales>(a));
    uint8_t* data = direction.data + line * direction.row_bytes + code_bytes<Code>(column + 16 * sixteen);
    uint8_t* scales = direction.scale + (byte_scales<kScales>(a) ? scale_at : 4 * scale_at);
    const int64_t scale_step = scale_line<kScales>(direction) * (byte_scales<kScales>(a) ? kStep : 4 * kStep);
    const int bytes = left(direction.row_bytes, code_bytes<Code>(column + 16 * sixteen), kCodeBytes);
    const bool exists = 16 * sixteen < columns_left, stores_scale = exists && lanes > 0 && sixteen % lanes == 0;
    const int64_t granule = column / 16 + min(sixteen, (columns_left - 1) / 16);  // where there is none, the last one
#pragma unroll 1
    for (int r = threadIdx.x / kTileSixteens; r < kTile;
         r += kStep, data += kStep * direction.row_bytes, scales += scale_step) {
      const Sixteen<E> elements = tile.row_sixteen(r, sixteen);
      BlockScale scale;
      uint32_t amax;
      if (a.squares) {
        amax = square_amax(r / 16, sixteen);
        scale = {0, shared.square_encode[r / 16][sixteen]};
      } else {
        amax = max_of_lanes(magnitude_bits<E>(elements.words), lanes);
        scale = scale_of(shared.matrices[0], a, elements, amax, shared.tables[0]);
        correct_scale<kScales>(elements, shared.row_keys, direction.random, row + r, granule, exists && r < rows_left,
                               scale);
        if (stores_scale && r < rows_left) store_scale<kScales>(a, scales, 0, scale.stored);
      }
      uint32_t random[4] = {}, codes[kCodeWords<Code>];
      if constexpr (kRandomCodes)
        random_bytes(shared.row_keys, direction.random, row + min(r, rows_left - 1), granule, random);
      quantize_sixteen<Code, kScales, kRandomCodes>(a, elements, scale, amax, random, codes);
      if (r < rows_left) store_codes(data, bytes, direction.pieces, codes);
    }
  }

  // --- columns

  /// Maxima of the blocks that a thread's pair of columns has: blocks of 32 are the thread's own, larger ones go on.
  __device__ __forceinline__ void column_maxima(uint32_t (&amax)[2]) const {
    static_assert(kUnits == 2, "blocks of 32 belong to a thread");
    amax[0] = amax[1] = 0;
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t pairs[Tile<E>::kPairWords];
      tile.load_pair(16 * unit_sixteen(unit), pair(), pairs);
#pragma unroll
      for (int c = 0; c < 2; ++c) amax[c] = max(amax[c], magnitude_bits<E>(Tile<E>::column_sixteen(pairs, c).words));
    }
    if (a.log_block <= 5) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) shared.column_amax[threadIdx.x / kTilePairs][2 * pair() + c] = amax[c];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairThreads; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) amax[c] = max(amax[c], shared.column_amax[i][2 * pair() + c]);
  }

  __device__ __forceinline__ void columns() const {
    uint32_t maxima[2] = {};
    if constexpr (!kIsTwoLevel<kScales>)
      if (!a.squares && a.log_block > 0) column_maxima(maxima);
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t pairs[Tile<E>::kPairWords];
      tile.load_pair(16 * unit_sixteen(unit), pair(), pairs);
      if constexpr (kRotate) flip_signs<E>(pairs, a.sign_mask);
#pragma unroll
      for (int c = 0; c < 2; ++c) column_unit(pairs, unit_sixteen(unit), c, maxima[c]);
    }
  }

  /// 16 rows of a column: codes, and the scale where they are a block's first.
  __device__ __forceinline__ void column_unit(const uint32_t (&pairs)[Tile<E>::kPairWords], int down, int c,
                                              uint32_t amax) const {
    const int across = 2 * pair() + c;
    Sixteen<E> sixteen;
    if constexpr (kRotate)
      sixteen = rotated_sixteen<E>(pairs, c);
    else
      sixteen = Tile<E>::column_sixteen(pairs, c);
    BlockScale scale;
    if (a.squares) {
      amax = square_amax(down, across / 16);
      scale = {0, shared.square_encode[down][across / 16]};
    } else {
      if (kIsTwoLevel<kScales> || a.log_block == 0) amax = magnitude_bits<E>(sixteen.words);
      scale = scale_of(shared.matrices[1], a, sixteen, amax, shared.tables[kIsTwoLevel<kScales> ? 1 : 0]);
      correct_scale<kScales>(sixteen, shared.column_keys, a.columnwise.random, column + across, row / 16 + down,
                             across < columns_left && 16 * down < rows_left, scale);
      store_column_scale(down, across, scale);
    }
    uint32_t random[4] = {};
    if constexpr (kRandomCodes)
      random_bytes(shared.column_keys, a.columnwise.random, column + min(across, columns_left - 1),
                   row / 16 + min(down, (rows_left - 1) / 16), random);
    quantize_sixteen<Code, kScales, kRandomCodes>(a, sixteen, scale, amax, random,
                                                  shared.codes[column_piece<Code>(across, down)].words);
  }

  /// Bytes gather in shared memory; a float32 has no neighbours in the tile.
  __device__ __forceinline__ void store_column_scale(int down, int across, const BlockScale& scale) const {
    if (byte_scales<kScales>(a)) {
      const int sixteens = sixteens_in_block<kScales>(a);
      if (down % sixteens == 0) shared.column_scales[across][down / sixteens] = static_cast<uint8_t>(scale.stored);
    } else if (a.scaling == Scaling::kFloat32 && down == 0 && across < columns_left) {
      store_scale<kScales>(a, a.columnwise.scale, scale_place<kScales>(a.columnwise, batch, column + across, row / kTile),
                           scale.stored);
    }
  }

  /// The codes and scales that the columns left in shared memory: to their places.
  __device__ __forceinline__ void store_columns() const {
    store_column_codes<Code>(*this, a.columns, a.columnwise, shared.codes);
    if (byte_scales<kScales>(a) && !a.squares) store_column_scales();
  }

  __device__ __forceinline__ void store_column_scales() const {
    const int across = threadIdx.x, count = kTile >> log_block<kScales>(a);
    if (across >= columns_left) return;
    const int64_t first = row >> log_block<kScales>(a);
    const int scales = left(a.columnwise.scale_columns, first, count);
    uint8_t* to = a.columnwise.scale + (batch * a.columns + column + across) * a.columnwise.scale_columns + first;
    const uint8_t* from = shared.column_scales[across];
    if (count == scales && reinterpret_cast<uintptr_t>(to) % count == 0) {
      if (count == 8)
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
      else
        *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < scales; ++i) to[i] = from[i];
  }
};

/// Blocks that registers are to suffice for; an sm_90 has shared memory for them. The code for sm_100 and later needs more
/// registers.
template <class E, Scales kScales, bool kStochastic>
constexpr int kTileBlocks = E::kBytes == 4 || kIsChosen<kScales> || kEden<kScales, kStochastic> ? 2
                            : kStochastic && kArch >= 1000                                      ? 2
                            : kStochastic                                                       ? 3
                                                                                                : 4;

/// The block's tiles of kTiles matrices, which are quantised alike, and of which results[i] says where they are.
/// prepare(corner, tiles): what a thread does to the elements that it has copied itself, before others see them.
template <class E, class Code, Scales kScales, bool kStochastic, bool kRotate, int kTiles, class Prepare>
JLP_DEVICE void quantize_each_tile(const Tiles& places, const QuantizeArguments* results, Prepare prepare) {
  static_assert(kTiles == 1 || (!kIsTwoLevel<kScales> && !kStochastic), "what a matrix fixes is kept of one");
  using Shared = TilesShared<E, Code, kScales, kStochastic, kTiles>;
  Shared& shared = block_shared<Shared>();
  const QuantizeArguments& a = *results;
  const auto corner_of = [&](TilePlace at) { return TileCorner::of(at, a.rows, a.columns); };
  const auto load = [&](TilePlace at, int i) {
    if (at.batch >= places.count.batch) return;
    const auto* x = static_cast<const typename E::Storage*>(results[i].x) + at.batch * a.rows * a.columns;
    shared.tiles[i].load(x, a.rows, a.columns, static_cast<int64_t>(at.down) * kTile,
                         static_cast<int64_t>(at.across) * kTile, results[i].pieces);
  };
  uint32_t started = ~0u;  // the matrix whose scales are at hand
  const auto start = [&](TilePlace at, int) {
    if (at.batch != started) {
      const auto row_matrix = Matrix<kScales>::start(a, a.rowwise, at.batch, shared.tables[0]);
      const auto column_matrix =
          Matrix<kScales>::start(a, a.columnwise, at.batch, shared.tables[kIsTwoLevel<kScales> ? 1 : 0]);
      if (threadIdx.x == 0) shared.matrices[0] = row_matrix, shared.matrices[1] = column_matrix;
      start_keys(a.rowwise, at.batch, shared.row_keys);
      start_keys(a.columnwise, at.batch, shared.column_keys);
      started = at.batch;
    }
    prepare(corner_of(at), shared.tiles);
  };
  each_tile<kTiles, false>(places, load, start, [&](TilePlace at, int i) {
    const TileQuantizer<E, Code, kScales, kStochastic, kRotate, kTiles> tile = {corner_of(at), results[i], shared,
                                                                                shared.tiles[i]};
    if (i == 0) {
      store_tensor_scale(a, a.rowwise, shared.matrices[0], at);
      store_tensor_scale(a, a.columnwise, shared.matrices[1], at);
    }
    const bool rowwise = results[i].rowwise.data, columnwise = results[i].columnwise.data;
    if (a.squares) {
      const int either = rowwise ? 0 : 1;  // they have the same amax
      tile.square_scales(shared.matrices[either], shared.tables[kIsTwoLevel<kScales> ? either : 0]);
    }
    if (rowwise) tile.rows();
    if (columnwise) tile.columns();
    return [=] {
      if (tile.a.columnwise.data) tile.store_columns();
    };
  });
}

template <class E, class Code, Scales kScales, bool kStochastic, bool kRotate>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, kScales, kStochastic>)
    quantize_tiles(const __grid_constant__ QuantizeArguments a) {
  quantize_each_tile<E, Code, kScales, kStochastic, kRotate, 1>(a.tiles, &a, [](const auto&, auto&) {});
}

}  // namespace cuda
}  // namespace jaxlowprec
