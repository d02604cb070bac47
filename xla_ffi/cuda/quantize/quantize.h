// Quantisation by type of code. The definition is quantize_launch.cuh's; each instantiation is compiled in a source file of
// its own, which CMakeLists.txt writes from quantize_codes.cu.in, so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

/// Whether the indices of random numbers fit: kernels count them in 32 bits.
inline bool random_fits(const QuantizeProblem& p) {
  for (const Random& random : {p.rowwise.random, p.columnwise.random})
    if (p.batch * random.rows_step > UINT32_MAX || p.batch * random.sixteens_step > UINT32_MAX) return false;
  return true;
}

/// kTwoLevel: NVFP4's scaling; else any that the problem's format names.
template <class Code, bool kTwoLevel>
cudaError_t quantize_codes(const QuantizeProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
