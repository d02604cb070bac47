#include "quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t quantize_e5m2(const QuantizeProblem& problem, cudaStream_t stream) {
  return quantize_codes<E5M2, false>(problem, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
