#include "norm_amaxes.cuh"
#include "norm_launch.h"
#include "norms.cuh"
#include "result_amaxes.h"

namespace jaxlowprec {
namespace cuda {
namespace {

constexpr int64_t kKeptBytes = 48 * 1024;  // every device has this much for a block

NormArguments norm_arguments(const NormProblem& p, const RowPieces& row) {
  NormArguments a{};
  a.x = p.x, a.residual = p.residual, a.weight = p.weight, a.beta = p.beta;
  a.result = p.result, a.total = p.total, a.mean = p.mean, a.inverse = p.inverse;
  a.lines = p.batch * p.rows, a.rows = p.rows, a.pieces = row.count;
  a.each = static_cast<float>(1.0 / p.columns), a.epsilon = p.epsilon;
  return a;
}

/// Rows are kept whole, or not at all.
cudaError_t launch_plain(const NormProblem& p, const RowPieces& row, cudaStream_t stream) {
  NormArguments a = norm_arguments(p, row);
  const int64_t row_bytes = int64_t{row.count} * row.bytes;
  const bool again = p.result || p.kind == NormKind::kLayer;
  a.keeps = again && row_bytes <= kKeptBytes ? row.count : 0;
  int64_t warps = kRowsOfBlock;
  while (a.keeps && warps * row_bytes > kKeptBytes) warps /= 2;
  const Blocks blocks{divide_up(a.lines, warps), 1, 1, static_cast<int>(32 * warps),
                      a.keeps ? static_cast<size_t>(warps * row_bytes) : 0};
  return with_norm(p.type, row.whole, p.kind, [&](auto type, auto whole, auto kind) {
    return launch_blocks(norm_kernel<type, whole, kind>, blocks, stream, a);
  });
}

cudaError_t launch_amaxed(const NormProblem& p, const RowPieces& row, cudaStream_t stream) {
  AmaxedNormArguments a{};
  a.norm = norm_arguments(p, row);
  const cudaError_t error = kept_pieces(row, kAmaxedNormRows, sizeof(AmaxedNormShared), a.norm.keeps);
  if (error != cudaSuccess) return error;
  const int64_t down = divide_up(p.rows, kAmaxedNormRows);
  if (down > INT32_MAX || p.batch > INT32_MAX) return cudaErrorInvalidValue;
  a.columns = p.columns, a.down = static_cast<uint32_t>(down);
  a.plain = p.amaxes.plain, a.rotated = p.amaxes.rotated, a.sign_mask = p.amaxes.sign_mask;
  const size_t kept = kAmaxedNormRows * static_cast<size_t>(divide_up(int64_t{a.norm.keeps} * row.bytes, 16) * 16);
  const Blocks blocks{p.batch * down, 1, 1, kAmaxedNormThreads, sizeof(AmaxedNormShared) + kept};
  return with_norm(p.type, row.whole, p.kind, [&](auto type, auto whole, auto kind) {
    return launch_blocks(amaxed_norm_kernel<type, whole, kind>, blocks, stream, a);
  });
}

}  // namespace

cudaError_t launch(const NormProblem& p, cudaStream_t stream) {
  const cudaError_t error = clear_amaxes(p.amaxes, p.batch, stream);
  if (error != cudaSuccess || p.batch * p.rows == 0 || p.columns == 0) return error;
  if (p.columns > INT32_MAX / 2) return cudaErrorInvalidValue;
  const RowPieces row(p.columns, p.type, all_aligned(p.x, p.residual, p.weight, p.beta, p.result, p.total));
  return p.amaxes.wanted() ? launch_amaxed(p, row, stream) : launch_plain(p, row, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
