// Gradients of norms (numerics.md 12.2): of the rows, and of the weight and of beta, which are sums over rows.
//
// Data flow: a block has a part of a matrix's rows, eight at a time. A warp loads a row of x and of dy and finds what the
// row's gradient needs, keeping both in shared memory. Then a thread takes pieces of columns of the eight rows, kept or once
// more from the L2 cache, with the weights loaded once: dx is written, and dy * n, and dy if it is wanted, are added to the
// part's sums in the order of the rows. The parts' sums are in a workspace; of more than eight rows a part they are read
// again, from the L2 cache, by the thread that wrote them. add_parts_kernel adds up the parts in their order.
//
// Bytes moved per element of 16 bits, twice that of 32: 6, with a residual 8; and 4 written and 4 read of each sum for every
// row of a part, 16 rows in all but small arrays: 1/4 + 1/4. A block keeps rows as norms.cu says.
// Launch: blocks of 256 threads, one for each part.
#include "norm_launch.h"
#include "norm_parts.h"
#include "row.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kNormGradientThreads = 32 * kGradientRows;
constexpr int kNormGradientBlocks = 2;  // that registers are to suffice for
constexpr int kGradientStep = 2;        // rows of a piece: loaded before the first is used

struct NormGradientArguments {
  const void *dy, *of_total, *x;
  const float *weight, *mean, *inverse;
  void* dx;
  float* sums;  // [batch, parts, 1 or 2, columns]
  int64_t rows, rows_each;
  uint32_t parts;     // of a matrix
  int pieces, keeps;  // of a row, and those of them that shared memory has room for
  float each;         // 1 / columns
  bool has_beta;      // whether dy is summed, too
};

/// What the gradient of a row needs: g = dy * weight less `mean`, and `slope` times the normed x.
struct RowGradient {
  float center, inverse, slope, mean;

  template <bool kLayer>
  __device__ __forceinline__ float normed(float x) const {
    return (kLayer ? x - center : x) * inverse;
  }
  template <bool kLayer>
  __device__ __forceinline__ float of_row(float normed, float scaled) const {
    return ((kLayer ? scaled - mean : scaled) - normed * slope) * inverse;
  }
};

/// Before the rows that are kept: those of x, then those of dy.
struct alignas(16) NormGradientShared {
  RowGradient rows[kGradientRows];
};

/// Loads a row, keeps it, and finds its numbers.
template <class P, bool kLayer>
JLP_DEVICE RowGradient find_gradient(const NormGradientArguments& a, const WarpRow<P>& row, int64_t parameters) {
  using Pieces = typename WarpRow<P>::Pieces;
  RowGradient found = {kLayer ? a.mean[row.line] : 0.0f, a.inverse[row.line], 0.0f, 0.0f};
  RowSum<P> products, all;
  row.each([&](int first) {
    Pieces x, dy;
    row.load(a.x, first, x), row.load(a.dy, first, dy);
    row.keep(0, first, x), row.keep(kGradientRows, first, dy);
#pragma unroll
    for (int j = 0; j < row.kAtOnce; ++j) {
      if (!row.has(first, j)) continue;
      typename P::Values v, scaled, weight;
      P::load_floats(a.weight, parameters + first + 32 * j, weight);
      P::decode(x[j], v), P::decode(dy[j], scaled);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) {
        scaled[i] = scaled[i] * weight[i];
        products.sums[j % products.kPeriod][i] += scaled[i] * found.normed<kLayer>(v[i]);
        if constexpr (kLayer) all.sums[j % all.kPeriod][i] += scaled[i];
      }
    }
  });
  found.slope = products.total() * a.each;
  if constexpr (kLayer) found.mean = all.total() * a.each;
  return found;
}

/// Some rows of a part that a block has.
struct GradientRows {
  int64_t line;        // the first of them, of all matrices'
  int64_t parameters;  // pieces before those of the matrix's weight
  int count;
  bool first;  // of the part
  float* sums;
};

/// A piece of each of the rows: dx, and what the rows add to the part's sums.
template <class P, bool kLayer>
JLP_DEVICE void finish_piece(const NormGradientArguments& a, const GradientRows& rows, int piece,
                             const NormGradientShared& shared, const typename P::Storage* kept) {
  float* const of_weight_sum = rows.sums + piece * P::kCount;
  float* const of_beta_sum = of_weight_sum + static_cast<int64_t>(a.pieces) * P::kCount;
  typename P::Values weight, of_weight = {}, of_beta = {};
  P::load_floats(a.weight, rows.parameters + piece, weight);
  if (!rows.first) {
    P::load_written(of_weight_sum, of_weight);
    if (a.has_beta) P::load_written(of_beta_sum, of_beta);
  }
#pragma unroll 1
  for (int start = 0; start < rows.count; start += kGradientStep) {
    typename P::Storage x[kGradientStep], dy[kGradientStep], of_total[kGradientStep] = {};
    const auto each = [&](auto visit) {  // rows that do not exist repeat the last one: one test for all loads
#pragma unroll
      for (int i = 0; i < kGradientStep; ++i) {
        const int r = min(start + i, rows.count - 1);
        visit(i, r, (rows.line + r) * a.pieces + piece);
      }
    };
    if (a.of_total) each([&](int i, int, int64_t index) { of_total[i] = P::load(a.of_total, index); });
    if (piece < a.keeps) {
      each([&](int i, int r, int64_t) {
        x[i] = kept[r * a.keeps + piece], dy[i] = kept[(kGradientRows + r) * a.keeps + piece];
      });
    } else {
      each([&](int i, int, int64_t index) { x[i] = P::load(a.x, index), dy[i] = P::load(a.dy, index); });
    }
    each([&](int i, int r, int64_t index) {
      if (start + i >= rows.count) return;
      const RowGradient row = shared.rows[r];
      typename P::Values v, d, more;
      P::decode(x[i], v), P::decode(dy[i], d);
      if (a.of_total) P::decode(of_total[i], more);
#pragma unroll
      for (int k = 0; k < P::kCount; ++k) {
        const float normed = row.normed<kLayer>(v[k]), of_row = row.of_row<kLayer>(normed, d[k] * weight[k]);
        v[k] = a.of_total ? of_row + more[k] : of_row;
        of_weight[k] += d[k] * normed, of_beta[k] += d[k];
      }
      P::store(a.dx, index, P::encode(v));
    });
  }
  P::store_floats(of_weight_sum, of_weight);
  if (a.has_beta) P::store_floats(of_beta_sum, of_beta);
}

template <ElementType kType, bool kWhole, NormKind kKind>
static __global__ void __launch_bounds__(kNormGradientThreads, kNormGradientBlocks)
    norm_gradient_kernel(const __grid_constant__ NormGradientArguments a) {
  using P = Piece<kType, kWhole>;
  constexpr bool kLayer = kKind == NormKind::kLayer;
  auto& shared = block_shared<NormGradientShared>();
  auto* const kept = reinterpret_cast<typename P::Storage*>(&shared + 1);
  const int warp = threadIdx.x / 32;
  const uint32_t batch = blockIdx.x / a.parts;
  const int64_t start = blockIdx.x % a.parts * a.rows_each, end = min(start + a.rows_each, a.rows);
  GradientRows rows;
  rows.parameters = static_cast<int64_t>(batch) * a.pieces;
  rows.sums = a.sums + static_cast<int64_t>(blockIdx.x) * (1 + a.has_beta) * a.pieces * P::kCount;
#pragma unroll 1
  for (int64_t r = start; r < end; r += kGradientRows) {
    rows.line = batch * a.rows + r, rows.count = static_cast<int>(min(int64_t{kGradientRows}, end - r));
    rows.first = r == start;
    if (!rows.first) __syncthreads();  // nobody needs the rows before any more
    if (warp < rows.count) {
      const WarpRow<P> row(rows.line + warp, a.pieces, kept + warp * a.keeps, a.keeps);
      const RowGradient found = find_gradient<P, kLayer>(a, row, rows.parameters);
      if (row.lane == 0) shared.rows[warp] = found;
    }
    __syncthreads();
#pragma unroll 1
    for (int piece = threadIdx.x; piece < a.pieces; piece += kNormGradientThreads)
      finish_piece<P, kLayer>(a, rows, piece, shared, kept);
  }
}

cudaError_t launch(const NormGradientProblem& p, cudaStream_t stream) {
  if (p.batch * p.rows == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns > INT32_MAX / 2 || p.batch > INT32_MAX) return cudaErrorInvalidValue;
  const RowPieces row(p.columns, p.type, all_aligned(p.dy, p.of_total, p.x, p.weight, p.dx, p.sums));
  const NormGradientParts parts(p.batch, p.rows);
  NormGradientArguments a{};
  a.dy = p.dy, a.of_total = p.of_total, a.x = p.x, a.weight = p.weight, a.mean = p.mean, a.inverse = p.inverse, a.dx = p.dx;
  a.sums = p.sums, a.has_beta = p.has_beta, a.rows = p.rows, a.rows_each = parts.rows_each;
  a.parts = static_cast<uint32_t>(parts.count), a.pieces = row.count, a.each = static_cast<float>(1.0 / p.columns);
  const cudaError_t error = kept_pieces(row, 2 * kGradientRows, sizeof(NormGradientShared), a.keeps);
  if (error != cudaSuccess) return error;
  const size_t kept = static_cast<size_t>(2 * kGradientRows) * a.keeps * row.bytes;
  const Blocks blocks{p.batch * parts.count, 1, 1, kNormGradientThreads, sizeof(NormGradientShared) + kept};
  return with_norm(p.type, row.whole, p.kind, [&](auto type, auto whole, auto kind) {
    return launch_blocks(norm_gradient_kernel<type, whole, kind>, blocks, stream, a);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
