// Rows in the hands of warps, and their sums in the order of numerics.md 12.2: 256 partial sums by place, then halves.
//
// Lane l of a warp has pieces l, l + 32, ... of a row. The places of its elements modulo 256 repeat, so that it has the
// partial sums of eight places whole, in registers, and adds to each in ascending order. With pieces of 8 elements they are
// 8 l + i, with pieces of 4 also 128 + 4 l + i, with single elements l, l + 32, ..., l + 224. Halves are added first across
// a lane's pieces, then across lanes, then within a piece: from far to near, as the rule has it.
#pragma once

#include "pieces.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kRowPlaces = 256;
constexpr int kRowPieces = 4;    // of each operand, a lane: loaded before the first is used
constexpr int kRowsOfBlock = 4;  // at most: a warp each
constexpr int kRowThreads = 32 * kRowsOfBlock;

/// The partial sums of a lane. kPeriod of its pieces have different places; piece number j of the lane is added to those of
/// j modulo kPeriod.
template <class P>
struct RowSum {
  static constexpr int kPeriod = kRowPlaces / (32 * P::kCount);
  static_assert(kRowPieces % kPeriod == 0 || kPeriod % kRowPieces == 0, "places of a piece are known when compiling");
  float sums[kPeriod][P::kCount] = {};

  /// The sum, to all lanes.
  __device__ __forceinline__ float total() {
#pragma unroll
    for (int half = kPeriod / 2; half >= 1; half /= 2)
#pragma unroll
      for (int j = 0; j < half; ++j)
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) sums[j][i] += sums[j + half][i];
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2)
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) sums[0][i] += __shfl_xor_sync(0xFFFFFFFFu, sums[0][i], distance);
#pragma unroll
    for (int half = P::kCount / 2; half >= 1; half /= 2)
#pragma unroll
      for (int i = 0; i < half; ++i) sums[0][i] += sums[0][i + half];
    return sums[0][0];
  }
};

/// The row of a warp.
template <class P>
struct WarpRow {
  static constexpr int kAtOnce = RowSum<P>::kPeriod < kRowPieces ? kRowPieces : RowSum<P>::kPeriod;
  using Pieces = typename P::Storage[kAtOnce];

  int64_t line;  // of all matrices'
  int pieces;    // of the row
  int lane;
  typename P::Storage* kept;  // memory of the block for the row's first `keeps` pieces, of each of several arrays
  int keeps;

  __device__ __forceinline__ WarpRow(int64_t line, int pieces, typename P::Storage* kept, int keeps)
      : line(line), pieces(pieces), lane(threadIdx.x % 32), kept(kept), keeps(keeps) {}

  /// Calls visit(the lane's first piece) for kAtOnce pieces after another: it has those at multiples of 32 from there on.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    for (int first = lane; first < pieces; first += 32 * kAtOnce) visit(first);
  }
  __device__ __forceinline__ bool has(int first, int j) const { return first + 32 * j < pieces; }

  /// The lane's pieces from `first` on of the row in an array: zeros beyond it.
  __device__ __forceinline__ void load(const void* from, int first, Pieces& to) const {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      to[j] = has(first, j) ? P::load(from, line * pieces + first + 32 * j) : typename P::Storage{};
  }
  __device__ __forceinline__ void load_written(const void* from, int first, Pieces& to) const {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      to[j] = has(first, j) ? P::load_written(from, line * pieces + first + 32 * j) : typename P::Storage{};
  }
  __device__ __forceinline__ void store(void* to, int first, const Pieces& from) const {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (has(first, j)) P::store(to, line * pieces + first + 32 * j, from[j]);
  }

  /// Whether what the warp has from its pieces at `first` on is kept, all of it.
  __device__ __forceinline__ bool has_kept(int first) const { return min(first - lane + 32 * kAtOnce, pieces) <= keeps; }
  /// To and from the block's memory, as far as it goes.
  __device__ __forceinline__ void keep(int array, int first, const Pieces& from) const {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < keeps) kept[array * keeps + first + 32 * j] = from[j];
  }
  __device__ __forceinline__ void recall(int array, int first, Pieces& to) const {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) to[j] = has(first, j) ? kept[array * keeps + first + 32 * j] : typename P::Storage{};
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
