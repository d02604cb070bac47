#include "norm_gradient.cuh"
#include "norm_launch.h"

namespace jaxlowprec {
namespace cuda {

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
