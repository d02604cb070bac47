// Norms of rows (numerics.md 12.2).
//
// Data flow: a warp has a row. It loads the row and adds up its squares (layer norms: its elements, and then the squares of
// what is left of them without their mean), keeping the row as it was read in shared memory; then it goes through the row
// again for the result. Rows that do not fit there are loaded again, from the L2 cache. Weights come from the L1 cache.
// norms.cu has another way through the result, and norm_quantize.cu takes the numbers of the rows alone.
//
// Bytes moved per element of 16 bits, twice that of 32: 4, with a residual 8.
// Launch: blocks of up to four warps, as many as keep their rows in 48 KiB.
#pragma once

#include "row.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kNormBlocks = 6;  // that registers are to suffice for

struct NormArguments {
  const void *x, *residual;
  const float *weight, *beta;
  void *result, *total;  // result null: the numbers of the rows are wanted, and the sum
  float *mean, *inverse;
  int64_t lines, rows;  // of all matrices, of one
  int pieces, keeps;    // of a row, and those of them that shared memory has room for
  float each, epsilon;  // 1 / columns
};

/// Pieces of x, or of x + residual, rounded.
template <class P>
JLP_DEVICE void load_row(const NormArguments& a, const WarpRow<P>& row, int first, typename WarpRow<P>::Pieces& pieces) {
  row.load(a.x, first, pieces);
  if (!a.residual) return;
  typename WarpRow<P>::Pieces residual;
  row.load(a.residual, first, residual);
#pragma unroll
  for (int j = 0; j < row.kAtOnce; ++j) {
    typename P::Values v, more;
    P::decode(pieces[j], v), P::decode(residual[j], more);
#pragma unroll
    for (int i = 0; i < P::kCount; ++i) v[i] = v[i] + more[i];
    pieces[j] = P::encode(v);
  }
}

/// The same once more: of x + residual the sum, which the same lane has written.
template <class P>
JLP_DEVICE void load_again(const NormArguments& a, const WarpRow<P>& row, int first, typename WarpRow<P>::Pieces& pieces) {
  if (row.has_kept(first))
    row.recall(0, first, pieces);
  else
    row.load_written(a.residual ? a.total : a.x, first, pieces);
}

/// What elements of a row are normalised by.
struct RowNumbers {
  float mean, inverse;  // the mean is that of layer norms

  template <bool kLayer>
  __device__ __forceinline__ float normed(float v, float weight) const {
    return ((kLayer ? v - mean : v) * inverse) * weight;
  }
};

/// Loads a row, keeps it, and finds and stores its numbers; stores x + residual, too.
template <class P, bool kLayer>
JLP_DEVICE RowNumbers find_numbers(const NormArguments& a, const WarpRow<P>& row) {
  using Pieces = typename WarpRow<P>::Pieces;
  RowSum<P> first_sum;  // of the elements, or of their squares
  row.each([&](int first) {
    Pieces pieces;
    load_row<P>(a, row, first, pieces);
    if (a.residual) row.store(a.total, first, pieces);
    row.keep(0, first, pieces);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (kLayer && !row.has(first, j)) continue;  // 0 more would make a 0 of a -0; squares are never negative
      typename P::Values v;
      P::decode(pieces[j], v);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) first_sum.sums[j % first_sum.kPeriod][i] += kLayer ? v[i] : v[i] * v[i];
    }
  });

  const float found = first_sum.total() * a.each;
  float mean = 0.0f, square = found;
  if constexpr (kLayer) {
    mean = found;
    RowSum<P> squares;
    row.each([&](int first) {
      Pieces pieces;
      load_again<P>(a, row, first, pieces);
#pragma unroll
      for (int j = 0; j < row.kAtOnce; ++j) {
        if (!row.has(first, j)) continue;
        typename P::Values v;
        P::decode(pieces[j], v);
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) squares.sums[j % squares.kPeriod][i] += (v[i] - mean) * (v[i] - mean);
      }
    });
    square = squares.total() * a.each;
  }
  const RowNumbers numbers = {mean, 1.0f / sqrtf(square + a.epsilon)};
  if (row.lane == 0) {
    if constexpr (kLayer) a.mean[row.line] = mean;
    a.inverse[row.line] = numbers.inverse;
  }
  return numbers;
}

template <ElementType kType, bool kWhole, NormKind kKind>
static __global__ void __launch_bounds__(kRowThreads, kNormBlocks) norm_kernel(const __grid_constant__ NormArguments a) {
  using P = Piece<kType, kWhole>;
  constexpr bool kLayer = kKind == NormKind::kLayer;
  const int warp = threadIdx.x / 32;
  const WarpRow<P> row(static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp, a.pieces,
                       &block_shared<typename P::Storage>() + warp * a.keeps, a.keeps);
  if (row.line >= a.lines) return;
  const RowNumbers numbers = find_numbers<P, kLayer>(a, row);
  if (!a.result) return;
  const int64_t parameters = row.line / a.rows * a.pieces;  // of the row's matrix
  row.each([&](int first) {
    typename WarpRow<P>::Pieces pieces;
    load_again<P>(a, row, first, pieces);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (!row.has(first, j)) continue;
      typename P::Values v, weight;
      P::decode(pieces[j], v);
      P::load_floats(a.weight, parameters + first + 32 * j, weight);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) v[i] = numbers.normed<kLayer>(v[i], weight[i]);
      if (a.beta) {
        typename P::Values beta;
        P::load_floats(a.beta, parameters + first + 32 * j, beta);
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) v[i] = v[i] + beta[i];
      }
      pieces[j] = P::encode(v);
    }
    row.store(a.result, first, pieces);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
