#include "quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t quantize_nvfp4(const QuantizeProblem& problem, cudaStream_t stream) {
  return quantize_codes<E2M1, true>(problem, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
