#include "launch.h"
#include "quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const QuantizeProblem& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0 || (!p.rowwise.data && !p.columnwise.data)) return cudaSuccess;
  for (const Random& random : {p.rowwise.random, p.columnwise.random})  // kernels count indices in 32 bits
    if (p.batch * random.rows_step > UINT32_MAX || p.batch * random.groups_step > UINT32_MAX) return cudaErrorInvalidValue;
  switch (p.format.code) {
    case CodeType::kE4M3: return quantize_e4m3(p, stream);
    case CodeType::kE5M2: return quantize_e5m2(p, stream);
    default: return p.format.scaling == Scaling::kTwoLevel ? quantize_nvfp4(p, stream) : quantize_mxfp4(p, stream);
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
