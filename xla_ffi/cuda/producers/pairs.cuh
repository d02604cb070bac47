// Pairs of neighbours in a row, as the producers hold them whose threads take columns.
#pragma once

#include "../quantize/amax.cuh"
#include "../quantize/tile_elements.cuh"
#include "pieces.cuh"

namespace jaxlowprec {
namespace cuda {

template <ElementType kType>
using ElementOf =
    std::conditional_t<kType == ElementType::kF32, F32, std::conditional_t<kType == ElementType::kF16, F16, BF16>>;

/// Two neighbours in a row.
template <ElementType kType>
struct Neighbours {
  static constexpr int kWords = 2 / kPerWord<kType>;
  using Words = uint32_t[kWords];
  using Both = std::conditional_t<kWords == 2, uint2, uint32_t>;
  using One = Piece<kType, false>;

  JLP_DEVICE void load(const void* from, int64_t index, Words& words) {
    split(__ldg(reinterpret_cast<const Both*>(static_cast<const typename One::Storage*>(from) + index)), words);
  }
  JLP_DEVICE void split(const Both& both, Words& words) {
    if constexpr (kWords == 2)
      words[0] = both.x, words[1] = both.y;
    else
      words[0] = both;
  }
  JLP_DEVICE void store(void* to, int64_t index, const Words& words) {
    auto* const both = reinterpret_cast<Both*>(static_cast<typename One::Storage*>(to) + index);
    if constexpr (kWords == 2)
      *both = make_uint2(words[0], words[1]);
    else
      *both = words[0];
  }

  /// The first `count` of them, not aligned; what is not loaded is zero.
  JLP_DEVICE void load(const void* from, int64_t index, Words& words, int count) {
    join(count > 0 ? One::load(from, index) : 0u, count > 1 ? One::load(from, index + 1) : 0u, words);
  }
  JLP_DEVICE void join(uint32_t first, uint32_t second, Words& words) {
    if constexpr (kWords == 2)
      words[0] = first, words[1] = second;
    else
      words[0] = first | second << 16;
  }
  JLP_DEVICE void store(void* to, int64_t index, const Words& words, int count) {
    using Narrow = typename One::Storage;
    if (count > 0) One::store(to, index, static_cast<Narrow>(words[0]));
    if (count > 1) One::store(to, index + 1, static_cast<Narrow>(kWords == 2 ? words[kWords - 1] : words[0] >> 16));
  }
};

// The sums of a tile's columns (numerics.md 12.3), for kernels whose threads take 16 rows of a pair of columns each.

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
