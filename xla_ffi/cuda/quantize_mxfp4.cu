#include "quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t quantize_mxfp4(const QuantizeProblem& problem, cudaStream_t stream) {
  return quantize_codes<E2M1, false>(problem, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
