// Quantisation by type of code. The definition is quantize_launch.cuh's; each instantiation is compiled in a source file of
// its own, which CMakeLists.txt writes from quantize_codes.cu.in, so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

/// kTwoLevel: NVFP4's scaling; else any that the problem's format names.
template <class Code, bool kTwoLevel>
cudaError_t quantize_codes(const QuantizeProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
