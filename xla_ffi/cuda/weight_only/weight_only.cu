#include "matmul_decode.h"
#include "weight_only_plan.h"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const WeightOnlyProblem& p, uint8_t* workspace, int64_t workspace_bytes, cudaStream_t stream) {
  const Format& format = p.weight.format;
  const bool int4 = format.code == CodeType::kInt4;
  const int64_t x_bytes = 2 * p.rows * p.depth, y_bytes = (p.type == ElementType::kF32 ? 4 : 2) * p.rows * p.columns;
  const int64_t w_bytes = p.columns * format.row_bytes(p.depth), scales = format.scales(p.columns, p.depth);
  const uintptr_t start = round_up(reinterpret_cast<intptr_t>(workspace), MatmulPlan::kAlignment);
  for (int64_t i = 0; i < p.batch; ++i) {
    MatmulDecodeProblem one{};
    one.x_bf16 = static_cast<const uint8_t*>(p.x) + i * x_bytes;
    one.w = {int4 ? WeightType::kInt4 : WeightType::kNvfp4,
             p.weight.data + i * w_bytes,
             p.weight.scale + i * scales * format.scale_bytes(),
             p.zero_point ? p.zero_point + i * scales : nullptr,
             format.block,
             format.tiles};
    one.alpha = p.weight.amax ? p.weight.amax + i : nullptr;
    one.rows = p.rows, one.columns = p.columns, one.depth = p.depth;
    one.result = static_cast<uint8_t*>(p.result) + i * y_bytes, one.type = p.type;
    one.workspace = reinterpret_cast<void*>(start);
    if (matmul_decode_workspace_bytes(one) + MatmulPlan::kAlignment > workspace_bytes) return cudaErrorInvalidValue;
    const cudaError_t status = launch(one, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxlowprec
