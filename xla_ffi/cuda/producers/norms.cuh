// Norms of rows and their gradients (numerics.md 12.2).
//
// Data flow: a warp has a row. It loads the row and adds up its squares (layer norms: its elements, and then the squares of
// what is left of them without their mean), keeping the row as it was read in shared memory; then it goes through the row
// again for the result. Rows that do not fit there are loaded again, from the L2 cache. Weights come from the L1 cache.
// A block's rows adjoin: what wants several rows of a result at once, finds them in one block.
//
// Bytes moved per element of 16 bits, twice that of 32: norms 4, with a residual 8; gradients 6, with a residual 8.
// Launch: blocks of up to four warps, as many as keep their rows in 48 KiB.
#pragma once

#include "row.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kNormBlocks = 6, kNormGradientBlocks = 5;  // that registers are to suffice for

struct NormArguments {
  const void *x, *residual;
  const float *weight, *beta;
  void *result, *total;
  float *mean, *inverse;
  int64_t lines, rows;  // of all matrices, of one
  int pieces;           // of a row
  float each, epsilon;  // 1 / columns
  bool keeps;           // rows fit into the shared memory
};

struct NormGradientArguments {
  const void *dy, *of_total, *x;
  const float *weight, *mean, *inverse;
  void* dx;
  int64_t lines, rows;
  int pieces;
  float each;
  bool keeps;
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

template <ElementType kType, bool kWhole, NormKind kKind>
static __global__ void __launch_bounds__(kRowThreads, kNormBlocks) norm_kernel(const __grid_constant__ NormArguments a) {
  using P = Piece<kType, kWhole>;
  using Pieces = typename WarpRow<P>::Pieces;
  constexpr bool kLayer = kKind == NormKind::kLayer;
  const WarpRow<P> row(a.pieces, 1, a.keeps);
  if (row.line >= a.lines) return;

  RowSum<P> first_sum;  // of the elements, or of their squares
  row.each([&](int first) {
    Pieces pieces;
    load_row<P>(a, row, first, pieces);
    if (a.residual) row.store(a.total, first, pieces);
    if (a.keeps) row.keep(0, first, pieces);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (kLayer && !row.has(first, j)) continue;  // 0 more would make a 0 of a -0; squares are never negative
      typename P::Values v;
      P::decode(pieces[j], v);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) first_sum.sums[j % first_sum.kPeriod][i] += kLayer ? v[i] : v[i] * v[i];
    }
  });
  const auto again = [&](int first, Pieces& pieces) {
    if (a.keeps)
      row.recall(0, first, pieces);
    else
      load_row<P>(a, row, first, pieces);
  };

  const float found = first_sum.total() * a.each;
  float mean = 0.0f, square = found;
  if constexpr (kLayer) {
    mean = found;
    RowSum<P> squares;
    row.each([&](int first) {
      Pieces pieces;
      again(first, pieces);
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
  const float inverse = 1.0f / sqrtf(square + a.epsilon);
  if (row.lane == 0) {
    if constexpr (kLayer) a.mean[row.line] = mean;
    a.inverse[row.line] = inverse;
  }

  const int64_t parameters = row.line / a.rows * a.pieces;  // of the row's matrix
  row.each([&](int first) {
    Pieces pieces;
    again(first, pieces);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (!row.has(first, j)) continue;
      typename P::Values v, weight;
      P::decode(pieces[j], v);
      P::load_floats(a.weight, parameters + first + 32 * j, weight);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) v[i] = ((kLayer ? v[i] - mean : v[i]) * inverse) * weight[i];
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

template <ElementType kType, bool kWhole, NormKind kKind>
static __global__ void __launch_bounds__(kRowThreads, kNormGradientBlocks)
    norm_gradient_kernel(const __grid_constant__ NormGradientArguments a) {
  using P = Piece<kType, kWhole>;
  using Pieces = typename WarpRow<P>::Pieces;
  constexpr bool kLayer = kKind == NormKind::kLayer;
  const WarpRow<P> row(a.pieces, 2, a.keeps);
  if (row.line >= a.lines) return;
  const float inverse = a.inverse[row.line], of_x = kLayer ? a.mean[row.line] : 0.0f;
  const int64_t parameters = row.line / a.rows * a.pieces;

  /// n and g of a piece (numerics.md 12.2).
  const auto normed_and_scaled = [&](int piece, auto x, auto dy, auto& normed, auto& scaled) {
    typename P::Values weight;
    P::load_floats(a.weight, parameters + piece, weight);
    P::decode(x, normed), P::decode(dy, scaled);
#pragma unroll
    for (int i = 0; i < P::kCount; ++i) {
      normed[i] = (kLayer ? normed[i] - of_x : normed[i]) * inverse;
      scaled[i] = scaled[i] * weight[i];
    }
  };

  RowSum<P> products, all;
  row.each([&](int first) {
    Pieces x, dy;
    row.load(a.x, first, x), row.load(a.dy, first, dy);
    if (a.keeps) row.keep(0, first, x), row.keep(1, first, dy);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (!row.has(first, j)) continue;
      typename P::Values normed, scaled;
      normed_and_scaled(first + 32 * j, x[j], dy[j], normed, scaled);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) {
        products.sums[j % products.kPeriod][i] += scaled[i] * normed[i];
        if constexpr (kLayer) all.sums[j % all.kPeriod][i] += scaled[i];
      }
    }
  });
  const float slope = products.total() * a.each;
  const float mean = kLayer ? all.total() * a.each : 0.0f;

  row.each([&](int first) {
    Pieces x, dy, of_total;
    if (a.of_total) row.load(a.of_total, first, of_total);
    if (a.keeps)
      row.recall(0, first, x), row.recall(1, first, dy);
    else
      row.load(a.x, first, x), row.load(a.dy, first, dy);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (!row.has(first, j)) continue;
      typename P::Values normed, dx;
      normed_and_scaled(first + 32 * j, x[j], dy[j], normed, dx);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) dx[i] = ((kLayer ? dx[i] - mean : dx[i]) - normed[i] * slope) * inverse;
      if (a.of_total) {
        typename P::Values more;
        P::decode(of_total[j], more);
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) dx[i] = dx[i] + more[i];
      }
      dy[j] = P::encode(dx);
    }
    row.store(a.dx, first, dy);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
