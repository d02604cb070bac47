// The amaxes of all rows, and of all columns (numerics.md 1 and 18).
//
//   16-byte pieces of a row -> maxima as integers, two 16-bit elements at once: of the thread's columns, in registers; of
//   the row, over its warp -> one atomic a row and warp; at a tile's end, over its warps -> one atomic a column and tile
//
// Bytes moved per element: 2 or 4 read, once for both.
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles of 256 rows by 256 columns
// (128 of float32); a warp has every eighth row of a tile.
#include "../launch.h"
#include "amax.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kLineWarps = kAmaxThreads / 32;
constexpr int kLineTileRows = 256;
constexpr int kLineAhead = 4;  // rows that are loaded before the first is used

struct LineAmaxesArguments {
  const void* x;
  int64_t rows, columns;
  Tiles tiles;
  uint32_t *of_rows, *of_columns;  // null: not wanted
  bool aligned;                    // rows begin at multiples of 16 bytes
};

struct LineAmaxesShared {
  uint32_t of_columns[kLineWarps][4][32];  // words of a lane's piece
};

/// The larger of two words of magnitudes.
template <class E>
JLP_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
  return E::kBytes == 4 ? max(a, b) : __vmaxu2(a, b);
}

template <class E>
__global__ void __launch_bounds__(kAmaxThreads, 4) line_amaxes(const __grid_constant__ LineAmaxesArguments a) {
  constexpr int kElements = 16 / E::kBytes;
  constexpr uint32_t kMask = E::kBytes == 4 ? kMagnitudeBits : 0x7FFF7FFFu;
  auto& shared = block_shared<LineAmaxesShared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = Tiles::next(a.tiles, at)) {
    const int64_t column = (static_cast<int64_t>(at.across) * 32 + lane) * kElements;
    const int64_t first = static_cast<int64_t>(at.down) * kLineTileRows + warp, matrix = at.batch * a.rows;
    const int64_t last = min(a.rows, static_cast<int64_t>(at.down + 1) * kLineTileRows);
    const auto* from = static_cast<const typename E::Storage*>(a.x) + (matrix + first) * a.columns + column;
    uint32_t most[4] = {};
#pragma unroll 1
    for (int64_t row = first; row < last; row += kLineAhead * kLineWarps) {
      uint4 pieces[kLineAhead];
#pragma unroll
      for (int i = 0; i < kLineAhead; ++i, from += kLineWarps * a.columns)
        pieces[i] = Tile<E>::load_chunk(from, row + i * kLineWarps < last ? a.columns - column : 0, a.aligned);
#pragma unroll
      for (int i = 0; i < kLineAhead; ++i) {
        const uint32_t words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) most[w] = larger<E>(most[w], words[w] & kMask);
        if (!a.of_rows) continue;
        const uint32_t of_row = __reduce_max_sync(0xFFFFFFFFu, magnitude_bits<E>(words));
        if (lane == 0 && row + i * kLineWarps < last)
          atomicMax(a.of_rows + matrix + row + i * kLineWarps, canonical_amax(of_row));
      }
    }
    if (!a.of_columns) continue;
#pragma unroll
    for (int w = 0; w < 4; ++w) shared.of_columns[warp][w][lane] = most[w];
    __syncthreads();
    if (threadIdx.x < 4 * 32) {
      const int word = threadIdx.x / 32;
      uint32_t found = 0;
#pragma unroll
      for (int i = 0; i < kLineWarps; ++i) found = larger<E>(found, shared.of_columns[i][word][lane]);
      uint32_t* to = a.of_columns + at.batch * a.columns + column + word * (kElements / 4);
      const int64_t there = a.columns - column - word * (kElements / 4);
      if constexpr (E::kBytes == 4) {
        if (there > 0) atomicMax(to, canonical_amax(found));
      } else {
        if (there > 0) atomicMax(to, canonical_amax(E::float_bits(found & 0xFFFFu)));
        if (there > 1) atomicMax(to + 1, canonical_amax(E::float_bits(found >> 16)));
      }
    }
    __syncthreads();
  }
}

cudaError_t launch(const LineAmaxesProblem& p, cudaStream_t stream) {
  const std::pair<uint32_t*, int64_t> results[] = {{p.of_rows, p.rows}, {p.of_columns, p.columns}};
  for (const auto& [result, lines] : results) {
    if (!result || p.batch * lines == 0) continue;
    const cudaError_t error = cudaMemsetAsync(result, 0, p.batch * lines * sizeof *result, stream);
    if (error != cudaSuccess) return error;
  }
  if (p.batch * p.rows * p.columns == 0 || (!p.of_rows && !p.of_columns)) return cudaSuccess;
  return with_element(p.type, [&](auto element) {
    using E = decltype(element);
    LineAmaxesArguments a = {
        p.x, p.rows, p.columns, {}, p.of_rows, p.of_columns, aligned(p.x, 16) && p.columns * E::kBytes % 16 == 0};
    if (!cut(p.batch, divide_up(p.rows, kLineTileRows), divide_up(p.columns, 32 * (16 / E::kBytes)), a.tiles))
      return cudaErrorInvalidValue;
    return launch_over_tiles<line_amaxes<E>, LineAmaxesShared>(kAmaxThreads, a, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
