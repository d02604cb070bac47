// Whole tiles of 128 x 128 bfloat16, of which two are in shared memory.
#pragma once

#include "tile.cuh"

namespace jaxlowprec {
namespace cuda {

/// Of two tiles, rows of chunks of 8 elements, permuted as the kernel's Place::chunk(row, chunk) says.
using TileBuffers = uint4[2][kTile][kTile / 8];

/// One direction's results.
struct WholeDirection {
  const float* tensor;          // the amaxes of NVFP4
  uint8_t *data, *scale;        // data null: not wanted
  int64_t data_row, scale_row;  // bytes from a line to the next
  Random random;                // of stochastic rounding
  int64_t scale_block;          // bytes from a block's scale to that of the next
  int64_t scale_matrix;         // of a matrix's scales

  JLP_DEVICE uint8_t* scale_at(const WholeDirection& d, uint32_t batch, int64_t line, uint32_t block) {
    return d.scale + batch * d.scale_matrix + line * d.scale_row + block * d.scale_block;
  }
};

struct WholeTilesArguments {
  const uint16_t* x;
  int64_t rows, columns;
  Tiles tiles;
  WholeDirection rowwise, columnwise;
  uint32_t sign_mask;  // of rotated columns
};

/// Starts copying a tile, if there is one at `at`.
template <int kThreads, class Place>
JLP_DEVICE void load_tile(const Tiles& places, const WholeTilesArguments& a, TilePlace at, uint4 (&to)[kTile][kTile / 8]) {
  constexpr int kChunks = kTile / 8, kRows = kThreads / kChunks;
  if (at.batch < places.count.batch) {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int64_t line = static_cast<int64_t>(at.batch) * a.rows + at.down * kTile + row;
    const uint16_t* from = a.x + line * a.columns + at.across * kTile + chunk * 8;
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i, from += kRows * static_cast<uint32_t>(a.columns))
      copy_async16(&to[row + i * kRows][Place::chunk(row, chunk)], from);
  }
  copy_async_commit();
}

/// The chunks of a buffer that a thread has copied itself: before the threads meet it may use those.
template <int kThreads, class Place>
struct OwnChunks {
  static constexpr int kOwnRows = kThreads / (kTile / 8);  // from one to the next, which have the same place in their rows
  JLP_DEVICE int own_row() { return threadIdx.x / (kTile / 8); }
  JLP_DEVICE int own_chunk() { return threadIdx.x % (kTile / 8); }
  __device__ __forceinline__ uint4& own(int row) const { return tile[row][Place::chunk(own_row(), own_chunk())]; }

  uint4 (&tile)[kTile][kTile / 8];
};

/// A thread's sixteen of a row of a tile.
template <class Place>
JLP_DEVICE Sixteen<BF16> row_sixteen(const uint4 (&tile)[kTile][kTile / 8], int row, int sixteen) {
  Sixteen<BF16> x;
#pragma unroll
  for (int i = 0; i < 2; ++i) set_piece(x, i, tile[row][Place::chunk(row, 2 * sixteen + i)]);
  return x;
}

// --- codes of four bits of columns, gathered in shared memory: 16 rows a piece of 8 bytes

using PackedColumns = uint2[kTile][kTileSixteens];

/// Where piece `piece` of a column lies: the even columns' lines before the odd ones'.
JLP_DEVICE uint2& packed_piece(PackedColumns& codes, int pair, int odd, int piece) {
  return codes[kTilePairs * odd + pair][piece ^ (pair / 2 % 8)];
}

/// All of them to their lines, 16 bytes a thread at a time.
template <int kThreads>
JLP_DEVICE void store_packed_columns(const WholeTilesArguments& a, TilePlace at, PackedColumns& codes) {
  const int64_t first = static_cast<int64_t>(at.batch) * a.columns + at.across * kTile;
#pragma unroll
  for (int part = 0; part < kTile * 4 / kThreads; ++part) {
    const int line = threadIdx.x / 4 + kThreads / 4 * part, quarter = threadIdx.x % 4, pair = line % kTilePairs;
    const uint2 v = packed_piece(codes, pair, line / kTilePairs, 2 * quarter);
    const uint2 w = packed_piece(codes, pair, line / kTilePairs, 2 * quarter + 1);
    uint8_t* const to = a.columnwise.data + (first + 2 * pair + line / kTilePairs) * a.columnwise.data_row;
    *reinterpret_cast<uint4*>(to + at.down * (kTile / 2) + 16 * quarter) = {v.x, v.y, w.x, w.y};
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
