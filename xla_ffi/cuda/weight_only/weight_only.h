// Few rows of activations by a quantised weight on the GPU.
#pragma once

#include "../launch.h"

namespace jaxlowprec {
namespace cuda {

/// alpha * x w^T: no bias, no activation, nothing accumulated; `weight.amax` is alpha.
cudaError_t launch(const WeightOnlyProblem& problem, uint8_t* workspace, int64_t workspace_bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
