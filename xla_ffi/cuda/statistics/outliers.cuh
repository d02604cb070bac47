// How many elements of each column are beyond a threshold.
//
// Data flow: a thread takes eight columns of every eighth row of a tile, four rows in flight, and counts in registers; the
// block's eight warps add up in shared memory, and each column is added to the result once. Counts are integers, so the
// order in which blocks add changes nothing.
// Bytes moved per element: 2 or 4 read. The result is zeroed first, and each count added to for every 256 rows.
// Launch: blocks of 256 threads, one for each tile of 256 rows by 256 columns.
#pragma once

#include "elements.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kOutlierTile = 256, kOutlierThreads = 256, kOutlierWarps = kOutlierThreads / 32;
constexpr int kOutlierRowsInFlight = 4;

struct OutliersArguments {
  const void* x;
  const float* threshold;
  int32_t* result;
  int64_t rows, columns;
  uint32_t row_tiles, column_tiles;  // of a matrix
  bool whole;                        // rows are whole eights, and aligned
};

struct OutliersShared {
  int32_t counts[kOutlierTile];
};

template <ElementType kType>
static __global__ void __launch_bounds__(kOutlierThreads, 4) outliers_kernel(const OutliersArguments a) {
  OutliersShared& shared = block_shared<OutliersShared>();
  const uint32_t column_tile = blockIdx.x % a.column_tiles, rest = blockIdx.x / a.column_tiles;
  const int64_t batch = rest / a.row_tiles, from = static_cast<int64_t>(rest % a.row_tiles) * kOutlierTile;
  const int64_t to = min(from + kOutlierTile, a.rows);
  const int64_t first_column = static_cast<int64_t>(column_tile) * kOutlierTile;
  const int64_t column = first_column + threadIdx.x % 32 * 8, count = a.columns - column;
  const uint32_t threshold = Lanes<float>::bits(a.threshold[batch]);
  shared.counts[threadIdx.x] = 0;
  int beyond[8] = {};
  for (int64_t row = from + threadIdx.x / 32; row < to; row += kOutlierWarps * kOutlierRowsInFlight) {
    EightElements<kType> x[kOutlierRowsInFlight];
#pragma unroll
    for (int i = 0; i < kOutlierRowsInFlight; ++i) {
      const int64_t at = row + i * kOutlierWarps;
      x[i].load(a.x, (batch * a.rows + at) * a.columns + column, at < to ? count : 0, a.whole);
    }
#pragma unroll
    for (int i = 0; i < kOutlierRowsInFlight; ++i) {
      float v[8];
      x[i].decode(v);
#pragma unroll
      for (int k = 0; k < 8; ++k) beyond[k] += finite_magnitude(v[k]) > threshold;
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (beyond[k]) atomicAdd(&shared.counts[threadIdx.x % 32 * 8 + k], beyond[k]);
  __syncthreads();
  const int found = shared.counts[threadIdx.x];
  if (found) atomicAdd(&a.result[batch * a.columns + first_column + threadIdx.x], found);
}

}  // namespace cuda
}  // namespace jaxlowprec
