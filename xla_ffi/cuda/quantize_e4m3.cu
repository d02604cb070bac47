#include "quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t quantize_e4m3(const QuantizeProblem& problem, cudaStream_t stream) {
  return quantize_codes<E4M3, false>(problem, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
