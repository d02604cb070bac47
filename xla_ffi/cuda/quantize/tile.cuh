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

// --- Whole tiles of 128 x 128 bfloat16, of which two are in shared memory.

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
