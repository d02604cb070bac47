#include "../dequantize.cuh"
#include "rebase.cuh"
#include "rebase.h"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const RebaseProblem& p, cudaStream_t stream) {
  const MatmulOperand& operand = p.operand;
  const Format& f = operand.format;
  const int64_t width = rebased_width(operand.columns);
  if (!rebase_supports(operand) || p.rows > INT32_MAX || width > INT32_MAX || !aligned(operand.data, 8) ||
      !aligned(p.codes, 16))
    return cudaErrorInvalidValue;
  if (p.rows * width == 0) return cudaSuccess;
  RebaseArguments a{operand.data, operand.scale, p.codes, reinterpret_cast<uint32_t*>(p.scales)};
  a.rows = static_cast<uint32_t>(p.rows), a.sixteens = static_cast<uint32_t>(operand.columns / 16);
  a.blocks = static_cast<uint32_t>(width / 128), a.scale_stride = static_cast<uint32_t>(f.scale_columns(operand.columns));
  a.row_shift = f.tiles ? log2_of(f.block) : 0;
  if (!cut(1, divide_up(p.rows, kRebaseRows), divide_up(a.blocks, kRebaseAhead), a.tiles)) return cudaErrorInvalidValue;
  struct Nothing {};
  return launch_over_tiles<rebase_kernel, Nothing>(kRebaseThreads, a, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
