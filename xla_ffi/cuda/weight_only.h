// Few rows of activations by a quantised weight on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../problems.h"

namespace jaxlowprec {
namespace cuda {

/// alpha * x w^T: no bias, no activation, nothing accumulated; `weight.amax` is alpha. Empty, or why it cannot be.
std::string launch(const WeightOnlyProblem& problem, uint8_t* workspace, int64_t workspace_bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
