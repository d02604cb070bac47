// The sums of a tile's columns (numerics.md 12.3), for kernels whose threads take 16 rows of a pair of columns each.
#pragma once

#include "../quantize/amax.cuh"
#include "pairs.cuh"

namespace jaxlowprec {
namespace cuda {

static_assert(kRotatedRows == kSummedRows, "a tile is a part of the rows");

struct TileSums {
  float2 of_thread[kAmaxThreads];
};

/// The sum of 16 rows of a pair of columns, as Tile::load_pair gives them.
template <ElementType kType, int kWords>
JLP_DEVICE float2 sum_of_pairs(const uint32_t (&pairs)[kWords]) {
  float2 sum{0, 0};
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float v[2];
#pragma unroll
    for (int w = 0; w < Neighbours<kType>::kWords; ++w) widen<kType>(pairs[16 * w + r], &v[w * kPerWord<kType>]);
    sum.x += v[0], sum.y += v[1];
  }
  return sum;
}

/// Adds up what the threads of a tile found, and writes it: `to` is where the sum of this thread's first column goes, of
/// which there are `columns`, two at most.
JLP_DEVICE void write_tile_sums(float2 sum, float* to, int columns, TileSums& shared) {
  shared.of_thread[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < kTilePairs) {
#pragma unroll
    for (int i = kTilePairs; i < kAmaxThreads; i += kTilePairs)
      sum.x += shared.of_thread[threadIdx.x + i].x, sum.y += shared.of_thread[threadIdx.x + i].y;
    if (columns > 0) to[0] = sum.x;
    if (columns > 1) to[1] = sum.y;
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace jaxlowprec
