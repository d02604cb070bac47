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
// Launch: blocks of 256 threads, as many as the device holds at once; the next tile's elements are on their way while the
// codes of the columns leave.
#pragma once

#include "quantize_scales.cuh"
#include "rotate.cuh"

namespace jaxlowprec {
namespace cuda {

/// The codes of 16 rows of a column: what is stored at once.
template <class Code>
struct alignas(4 * kCodeWords<Code>) CodePiece {
  uint32_t words[kCodeWords<Code>];
};

template <class E, class Code, bool kTwoLevel>
struct TilesShared {
  Tile<E> tile;
  CodePiece<Code> codes[kTile * kTileGroups];
  uint8_t column_scales[kTile][kTileGroups];
  float square_encode[kTileGroups][kTileGroups];
  uint32_t square_amax[kTileGroups][kTileGroups];  // of its first group in both directions, for a block
  EncodeTable tables[kTwoLevel ? 2 : 1];
  uint32_t column_amax[kTwoLevel ? 1 : kPairThreads][kTile];

  /// Where the codes of 16 rows of a column lie. Even columns come first, and pieces are permuted, so that neither the
  /// threads of neighbouring pairs nor those of neighbouring pieces meet in a bank.
  JLP_DEVICE int piece(int column, int rows_16) {
    const int pair = column / 2, line = pair + column % 2 * kTilePairs;
    const int turn = (kCodeWords<Code> == 2 ? pair / 2 : pair) % kTileGroups;
    return line * kTileGroups + (rows_16 ^ turn);
  }
};

/// One kernel's work on one tile.
template <class E, class Code, bool kTwoLevel, bool kStochastic, bool kRotate>
struct TileQuantizer {
  using Shared = TilesShared<E, Code, kTwoLevel>;
  const QuantizeArguments& a;
  Shared& shared;
  uint32_t batch;
  int64_t row, column;  // where the tile begins

  /// Threads that share a pair of columns take rows kUnits * 16 apart.
  JLP_DEVICE int pair() { return threadIdx.x % kTilePairs; }
  JLP_DEVICE int unit_group(int unit) { return threadIdx.x / kTilePairs * kUnits + unit; }

  // --- square blocks

  /// Scales of the square blocks: by the whole block of threads, with barriers.
  __device__ __forceinline__ void square_scales(const Matrix<kTwoLevel>& matrix) const {
    const int per_block = a.block / 16, group = threadIdx.x % kTileGroups, down = threadIdx.x / kTileGroups;
    if (down < kTileGroups) shared.square_amax[down][group] = 0;
    __syncthreads();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t pairs[Tile<E>::kPairWords];
      shared.tile.load_pair(16 * unit_group(unit), pair(), pairs);
      const uint32_t amax = max_of_lanes(magnitude_bits<E>(pairs), 8);
      const int first_down = unit_group(unit) / per_block * per_block, first = pair() / 8 / per_block * per_block;
      if (pair() % 8 == 0) atomicMax(&shared.square_amax[first_down][first], amax);
    }
    __syncthreads();
    if (down >= kTileGroups) return;
    const uint32_t amax = shared.square_amax[down / per_block * per_block][group / per_block * per_block];
    const BlockScale scale = Matrix<kTwoLevel>::scale(matrix, a, amax);
    shared.square_encode[down][group] = scale.encode;
    if (down % per_block || group % per_block) return;
    const int64_t r = row / 16 + down, c = column / 16 + group;  // of groups, in the matrix
    if (16 * r >= a.rows || 16 * c >= a.columns) return;
    store_square_scale(a.rowwise, r / per_block, c / per_block, scale);
    store_square_scale(a.columnwise, c / per_block, r / per_block, scale);
  }

  __device__ __forceinline__ void store_square_scale(const DirectionArguments& direction, int64_t r, int64_t c,
                                                     const BlockScale& scale) const {
    if (!direction.data) return;
    store_scale<kTwoLevel>(a, direction.scale, (batch * direction.scale_rows + r) * direction.scale_columns + c,
                           scale.stored);
  }

  /// The scale and amax of the square block that a group of 16 rows and one of 16 columns lie in.
  __device__ __forceinline__ BlockScale square_scale(int down, int across, uint32_t& amax) const {
    const int per_block = a.block / 16;
    amax = shared.square_amax[down / per_block * per_block][across / per_block * per_block];
    return {0, shared.square_encode[down][across]};
  }

  // --- rows

  __device__ __forceinline__ void rows(const Matrix<kTwoLevel>& matrix) const {
    const DirectionArguments& direction = a.rowwise;
    const int group = threadIdx.x % kTileGroups, lanes = kTwoLevel ? 1 : a.block / 16;
    const int64_t first = column + 16 * group;
    uint32_t key[2];
    load_key<kStochastic>(direction, batch, key);
#pragma unroll 2
    for (int r = threadIdx.x / kTileGroups; r < kTile; r += kTileThreads / kTileGroups) {
      const Group<E> elements = shared.tile.row_group(r, group);
      const int64_t line = batch * a.rows + row + r;
      const int64_t offset = kPacked<Code> ? first / 2 : first;
      BlockScale scale;
      uint32_t amax;
      if (a.squares) {
        scale = square_scale(r / 16, group, amax);
      } else {
        amax = max_of_lanes(magnitude_bits<E>(elements.words), lanes);
        scale = Matrix<kTwoLevel>::scale(matrix, a, amax);
        if (row + r < a.rows && first < a.columns && lanes > 0 && group % lanes == 0)
          store_scale<kTwoLevel>(a, direction.scale, line * direction.scale_columns + first / a.block, scale.stored);
      }
      if (row + r >= a.rows || offset >= direction.row_bytes) continue;
      uint32_t random[4] = {}, codes[kCodeWords<Code>];
      if (first < a.columns) random_bytes<kStochastic>(direction.random, key, row + r, first / 16, random);
      quantize_group<Code, kTwoLevel, kStochastic>(a, elements, scale, amax, random, codes);
      store_codes(direction.data + line * direction.row_bytes, offset, direction.row_bytes, direction.pieces, codes);
    }
  }

  // --- columns

  /// Maxima of the blocks that a thread's units of its pair of columns belong to.
  __device__ __forceinline__ void column_maxima(uint32_t (&amax)[kUnits][2]) const {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t pairs[Tile<E>::kPairWords];
      shared.tile.load_pair(16 * unit_group(unit), pair(), pairs);
#pragma unroll
      for (int c = 0; c < 2; ++c) amax[unit][c] = magnitude_bits<E>(Tile<E>::column_group(pairs, c).words);
    }
    if (a.block < 32) return;
#pragma unroll
    for (int c = 0; c < 2; ++c) amax[0][c] = amax[1][c] = max(amax[0][c], amax[1][c]);
    if (a.block == 32) return;
    const int above = threadIdx.x / kTilePairs;
#pragma unroll
    for (int c = 0; c < 2; ++c) shared.column_amax[above][2 * pair() + c] = amax[0][c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      for (int i = 0; i < kPairThreads; ++i) amax[0][c] = max(amax[0][c], shared.column_amax[i][2 * pair() + c]);
      amax[1][c] = amax[0][c];
    }
  }

  __device__ __forceinline__ void columns(const Matrix<kTwoLevel>& matrix) const {
    static_assert(kUnits == 2, "blocks of 32 belong to a thread");
    const DirectionArguments& direction = a.columnwise;
    uint32_t key[2];
    load_key<kStochastic>(direction, batch, key);
    uint32_t maxima[kUnits][2];
    if (!kTwoLevel && !a.squares) column_maxima(maxima);
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      uint32_t pairs[Tile<E>::kPairWords];
      shared.tile.load_pair(16 * unit_group(unit), pair(), pairs);
      if constexpr (kRotate) flip_signs<E>(pairs, a.sign_mask);
#pragma unroll
      for (int c = 0; c < 2; ++c) column_unit(matrix, key, pairs, unit_group(unit), c, unit ? maxima[1][c] : maxima[0][c]);
    }
  }

  /// 16 rows of a column: codes, and the scale where they are a block's first.
  __device__ __forceinline__ void column_unit(const Matrix<kTwoLevel>& matrix, const uint32_t (&key)[2],
                                              const uint32_t (&pairs)[Tile<E>::kPairWords], int down, int c,
                                              uint32_t amax) const {
    const DirectionArguments& direction = a.columnwise;
    const int across = 2 * pair() + c;
    Group<E> group;
    if constexpr (kRotate)
      group = rotated_group<E>(pairs, c);
    else
      group = Tile<E>::column_group(pairs, c);
    BlockScale scale;
    if (a.squares) {
      scale = square_scale(down, across / 16, amax);
    } else {
      if (kTwoLevel) amax = magnitude_bits<E>(group.words);
      scale = Matrix<kTwoLevel>::scale(matrix, a, amax);
      store_column_scale(down, across, scale);
    }
    uint32_t random[4] = {};
    const int64_t line = column + across, granule = row / 16 + down;
    if (line < a.columns && 16 * granule < a.rows) random_bytes<kStochastic>(direction.random, key, line, granule, random);
    quantize_group<Code, kTwoLevel, kStochastic>(a, group, scale, amax, random, shared.codes[Shared::piece(across, down)].words);
  }

  /// Bytes gather in shared memory; a float32 has no neighbours in the tile.
  __device__ __forceinline__ void store_column_scale(int down, int across, const BlockScale& scale) const {
    if (kTwoLevel || a.scaling == Scaling::kE8M0) {
      const int groups = kTwoLevel ? 1 : a.block / 16;
      if (down % groups == 0) shared.column_scales[across][down / groups] = static_cast<uint8_t>(scale.stored);
    } else if (a.scaling == Scaling::kFloat32 && down == 0 && column + across < a.columns) {
      store_scale<kTwoLevel>(a, a.columnwise.scale,
                             (batch * a.columns + column + across) * a.columnwise.scale_columns + row / kTile, scale.stored);
    }
  }

  /// The codes and scales that the columns left in shared memory: to their places.
  __device__ __forceinline__ void store_columns() const {
    const DirectionArguments& direction = a.columnwise;
    const int64_t first = kPacked<Code> ? row / 2 : row;
#pragma unroll 4
    for (int i = threadIdx.x; i < kTile * kTileGroups; i += kTileThreads) {
      const int line = i / kTileGroups, across = line % kTilePairs * 2 + line / kTilePairs, down = i % kTileGroups;
      const int64_t offset = first + down * 4 * kCodeWords<Code>;
      if (column + across >= a.columns || offset >= direction.row_bytes) continue;
      store_codes(direction.data + (batch * a.columns + column + across) * direction.row_bytes, offset, direction.row_bytes,
                  direction.pieces, shared.codes[Shared::piece(across, down)].words);
    }
    if (!a.squares && (kTwoLevel || a.scaling == Scaling::kE8M0)) store_column_scales();
  }

  __device__ __forceinline__ void store_column_scales() const {
    const int across = threadIdx.x, count = kTile / a.block;
    const int64_t first = row / a.block, left = a.columnwise.scale_columns - first;
    if (across >= kTile || column + across >= a.columns) return;
    uint8_t* to = a.columnwise.scale + (batch * a.columns + column + across) * a.columnwise.scale_columns + first;
    const uint8_t* from = shared.column_scales[across];
    if (count <= left && reinterpret_cast<uintptr_t>(to) % count == 0) {
      if (count == 8)
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
      else
        *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
      return;
    }
    for (int i = 0; i < count && i < left; ++i) to[i] = from[i];
  }
};

/// Blocks that a multiprocessor can hold, by shared memory and registers.
template <class E, class Code, bool kStochastic>
constexpr int kTileBlocks = E::kBytes == 4 ? 2 : 4;

template <class E, class Code, bool kTwoLevel, bool kStochastic, bool kRotate>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<E, Code, kStochastic>) quantize_tiles(const QuantizeArguments a) {
  using Shared = TilesShared<E, Code, kTwoLevel>;
  Shared& shared = block_shared<Shared>();
  Matrix<kTwoLevel> row_matrix = {}, column_matrix = {};
  uint32_t started = ~0u;  // the matrix whose scales these are
  const uint32_t tiles = a.batch * a.tiles_down * a.tiles_across;
  const auto tile_at = [&](uint32_t tile) -> TileQuantizer<E, Code, kTwoLevel, kStochastic, kRotate> {
    const uint32_t down = tile / a.tiles_across, batch = down / a.tiles_down;
    return {a, shared, batch, static_cast<int64_t>(down - batch * a.tiles_down) * kTile,
            static_cast<int64_t>(tile - down * a.tiles_across) * kTile};
  };
  const auto load = [&](uint32_t tile) {
    if (tile >= tiles) return;
    const auto at = tile_at(tile);
    const auto* x = static_cast<const typename E::Storage*>(a.x) + at.batch * a.rows * a.columns;
    shared.tile.load(x, a.rows, a.columns, at.row, at.column, a.pieces);
  };
  load(blockIdx.x);
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto at = tile_at(tile);
    if (at.batch != started) {
      row_matrix = Matrix<kTwoLevel>::start(a, a.rowwise, at.batch, shared.tables[0]);
      column_matrix = Matrix<kTwoLevel>::start(a, a.columnwise, at.batch, shared.tables[kTwoLevel ? 1 : 0]);
      started = at.batch;
    }
    copy_async_wait<0>();
    __syncthreads();
    if (threadIdx.x == 0 && at.row == 0 && at.column == 0) {
      store_tensor_scale(a, a.rowwise, row_matrix, at.batch);
      store_tensor_scale(a, a.columnwise, column_matrix, at.batch);
    }
    if (a.squares) {
      const Matrix<kTwoLevel> either = a.rowwise.data ? row_matrix : column_matrix;  // they have the same amax
      at.square_scales(either);
      __syncthreads();
    }
    if (a.rowwise.data) at.rows(row_matrix);
    if (a.columnwise.data) at.columns(column_matrix);
    __syncthreads();
    load(tile + gridDim.x);
    if (a.columnwise.data) at.store_columns();
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
