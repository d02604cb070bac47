// A tile of 128 x 128 elements in shared memory, to be read along its rows and along its columns, and the walk through the
// tiles of matrices.
//
// Rows are cut into chunks of 16 bytes, and every 8 of them lie permuted by the number of the 8: eight threads that read 16
// elements each, next to each other in a row, then meet no bank twice, and neither do 32 threads that read pairs of columns.
#pragma once

#include "../launch_grid.cuh"
#include "tile_elements.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kTile = 128;
constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kTileSixteens = kTile / 16;                // along either side
constexpr int kTilePairs = kTile / 2;                    // of columns
constexpr int kPairThreads = kTileThreads / kTilePairs;  // that share a pair of columns
constexpr int kUnits =
    kTileSixteens / kPairThreads;  // 16 rows of a pair of columns: a thread has so many, one below another

template <class E>
struct Tile {
  static constexpr int kChunkElements = 16 / E::kBytes;
  static constexpr int kChunks = kTile / kChunkElements;  // of a row
  alignas(16) uint32_t words[kTile * kTile * E::kBytes / 4];

  JLP_DEVICE int chunk_word(int row, int chunk) { return (row * kChunks + (chunk ^ (chunk >> 3))) * 4; }

  /// Starts copying the tile at (row, column) of a matrix; what is beyond the matrix becomes zero. Rows that begin at
  /// multiples of 16 bytes (`pieces`) are copied in the background: wait for the copies, then for the other threads.
  __device__ __forceinline__ void load(const typename E::Storage* x, int64_t rows, int64_t columns, int64_t row,
                                       int64_t column, bool pieces) {
    if (pieces && row + kTile <= rows && column + kTile <= columns) {
      const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      const auto* from = x + (row + first) * columns + column + chunk * kChunkElements;
      uint32_t* const to = words + chunk_word(first, chunk);
#pragma unroll
      for (int r = 0; r < kTile; r += kTileThreads / kChunks, from += kTileThreads / kChunks * columns)
        copy_async16(to + chunk_word(r, 0), from);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < kTile * kChunks; i += kTileThreads) {
        const int r = i / kChunks, chunk = i % kChunks;
        const int64_t left = row + r < rows ? columns - column - chunk * kChunkElements : 0;
        const auto* from = x + (row + r) * columns + column + chunk * kChunkElements;
        *reinterpret_cast<uint4*>(words + chunk_word(r, chunk)) = guarded_chunk(from, left);
      }
    }
    copy_async_commit();
  }

  /// A thread has copied chunk own_chunk() of rows own_row(), own_row() + kOwnRows, ...: before a barrier it may use those.
  static constexpr int kOwnRows = kTileThreads / kChunks;
  JLP_DEVICE int own_row() { return threadIdx.x / kChunks; }
  JLP_DEVICE int own_chunk() { return threadIdx.x % kChunks; }
  __device__ __forceinline__ uint4& own(int row) { return *reinterpret_cast<uint4*>(words + chunk_word(row, own_chunk())); }

  /// Elements [0, left) of a chunk in memory, zeros after them. whole: it begins at a multiple of 16 bytes.
  JLP_DEVICE uint4 load_chunk(const typename E::Storage* from, int64_t left, bool whole) {
    return whole && left >= kChunkElements ? __ldg(reinterpret_cast<const uint4*>(from)) : guarded_chunk(from, left);
  }

  /// 16 elements of a row.
  __device__ __forceinline__ Sixteen<E> row_sixteen(int row, int index) const {
    Sixteen<E> sixteen;
#pragma unroll
    for (int i = 0; i < Sixteen<E>::kPieces; ++i)
      set_piece(sixteen, i, *reinterpret_cast<const uint4*>(words + chunk_word(row, index * Sixteen<E>::kPieces + i)));
    return sixteen;
  }

  /// 16 rows of a pair of columns, as they lie in memory: 16 or 32 words.
  static constexpr int kPairWords = 16 * E::kBytes / 2;
  __device__ __forceinline__ void load_pair(int first_row, int pair, uint32_t (&pairs)[kPairWords]) const {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      if constexpr (E::kBytes == 4) {
        const uint2 both = *reinterpret_cast<const uint2*>(words + chunk_word(first_row + r, pair / 2) + pair % 2 * 2);
        pairs[r] = both.x, pairs[16 + r] = both.y;
      } else {
        pairs[r] = words[chunk_word(first_row + r, pair / 4) + pair % 4];
      }
    }
  }

  /// One of the two columns that load_pair read.
  JLP_DEVICE Sixteen<E> column_sixteen(const uint32_t (&pairs)[kPairWords], int column) {
    Sixteen<E> sixteen;
#pragma unroll
    for (int i = 0; i < Sixteen<E>::kWords; ++i) {
      if constexpr (E::kBytes == 4)
        sixteen.words[i] = pairs[16 * column + i];
      else
        sixteen.words[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], column ? 0x7632u : 0x5410u);
    }
    return sixteen;
  }

 private:
  JLP_DEVICE uint4 guarded_chunk(const typename E::Storage* from, int64_t left) {
    uint32_t w[4] = {};
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i)
      if (i < left) w[i * E::kBytes / 4] |= static_cast<uint32_t>(from[i]) << (8 * (i * E::kBytes % 4));
    return {w[0], w[1], w[2], w[3]};
  }
};

/// The block's tiles, from the matrices' end; at each place those of kTiles matrices, one after another.
///   load(at, buffer): starts copying a tile, or nothing where there is none
///   prepare(at, buffer): when a thread may use what it has copied itself, but not yet what others have; of kTiles buffers
///   use(at, buffer): reads the tile, and returns what is to be done when its buffer has been given away
/// kAhead: with two buffers for one matrix, a tile is on its way while the one before it is used; else while the results of
/// the one before it leave.
template <int kTiles, bool kAhead, class Load, class Prepare, class Use>
JLP_DEVICE void each_tile(const Tiles& places, Load load, Prepare prepare, Use use) {
  static_assert(!kAhead || kTiles == 1, "two buffers");
  TilePlace at = Tiles::last(places);
  int buffer = 0;
#pragma unroll 1
  for (int i = 0; i < kTiles; ++i) load(at, i);
#pragma unroll 1
  while (at.batch < places.count.batch) {
    const TilePlace next = Tiles::previous(places, at);
    if constexpr (kAhead) load(next, buffer ^ 1);
    copy_async_wait<kAhead ? 1 : 0>();
    prepare(at, buffer);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kTiles; ++i) {
      const auto leave = use(at, kAhead ? buffer : i);
      __syncthreads();
      if constexpr (!kAhead) load(next, i);
      leave();
      if (i + 1 < kTiles) __syncthreads();  // what it left in shared memory has been read
    }
    at = next;
    if constexpr (kAhead) buffer ^= 1;
  }
  copy_async_wait<0>();
}

}  // namespace cuda
}  // namespace jaxlowprec
