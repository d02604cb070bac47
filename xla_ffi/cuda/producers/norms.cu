#include "../launch_blocks.h"
#include "norms.cuh"
#include "result_amaxes.h"

namespace jaxlowprec {
namespace cuda {
namespace {

constexpr int64_t kKeptBytes = 48 * 1024;  // every device has this much for a block

/// Sets what the arguments of both kernels have in common, and gives visit the type, whether pieces are whole, the kind and
/// the blocks. `arrays`: of a row, that are kept; `whole`: whether the arrays are aligned.
template <class Problem, class Arguments, class Visit>
cudaError_t with_rows(const Problem& p, Arguments& a, int arrays, bool whole, Visit visit) {
  a.lines = p.batch * p.rows, a.rows = p.rows;
  if (a.lines == 0 || p.columns == 0) return cudaSuccess;
  if (p.columns > INT32_MAX / 2) return cudaErrorInvalidValue;
  const int64_t row_bytes = p.columns * element_bytes(p.type), kept = arrays * row_bytes;
  whole = whole && row_bytes % 16 == 0;
  a.pieces = static_cast<int>(whole ? row_bytes / 16 : p.columns);
  a.each = static_cast<float>(1.0 / p.columns);
  a.keeps = kept <= kKeptBytes;
  int64_t warps = kRowsOfBlock;
  while (a.keeps && warps * kept > kKeptBytes) warps /= 2;
  const Blocks blocks{divide_up(a.lines, warps), 1, 1, static_cast<int>(32 * warps),
                      a.keeps ? static_cast<size_t>(warps * kept) : 0};
  return with_type(p.type, [&](auto type) {
    const auto with_kind = [&](auto whole_pieces) {
      return p.kind == NormKind::kRms
                 ? visit(type, whole_pieces, std::integral_constant<NormKind, NormKind::kRms>(), blocks)
                 : visit(type, whole_pieces, std::integral_constant<NormKind, NormKind::kLayer>(), blocks);
    };
    return whole ? with_kind(std::true_type()) : with_kind(std::false_type());
  });
}

template <class... Pointer>
bool all_aligned(Pointer... pointers) {
  return (aligned(pointers, 16) && ...);  // null is
}

}  // namespace

cudaError_t launch(const NormProblem& p, cudaStream_t stream) {
  NormArguments a{};
  a.x = p.x, a.residual = p.residual, a.weight = p.weight, a.beta = p.beta;
  a.result = p.result, a.total = p.total, a.mean = p.mean, a.inverse = p.inverse, a.epsilon = p.epsilon;
  const bool whole = all_aligned(p.x, p.residual, p.weight, p.beta, p.result, p.total);
  const cudaError_t error = with_rows(p, a, 1, whole, [&](auto type, auto whole_pieces, auto kind, const Blocks& blocks) {
    return launch_blocks(norm_kernel<type, whole_pieces, kind>, blocks, stream, a);
  });
  if (error != cudaSuccess) return error;
  return launch_amaxes(p.amaxes, p.result, p.type, p.batch, p.rows * p.columns, p.columns, stream);
}

cudaError_t launch(const NormGradientProblem& p, cudaStream_t stream) {
  NormGradientArguments a{};
  a.dy = p.dy, a.of_total = p.of_total, a.x = p.x, a.weight = p.weight, a.mean = p.mean, a.inverse = p.inverse, a.dx = p.dx;
  const bool whole = all_aligned(p.dy, p.of_total, p.x, p.weight, p.dx);
  return with_rows(p, a, 2, whole, [&](auto type, auto whole_pieces, auto kind, const Blocks& blocks) {
    return launch_blocks(norm_gradient_kernel<type, whole_pieces, kind>, blocks, stream, a);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
