// GEMMs of quantised operands on the GPU: which way each takes, by format and compute capability, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <string>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

/// What a launch needs beside the problem, in the device's memory.
struct MatmulResources {
  const float* alpha_beta;  // [batch, 2]: what the sum is multiplied by, and what is accumulated onto; formats with a tensor
                            // scale alone, else null: 1, and whether something is accumulated onto
  uint8_t* workspace;
  int64_t workspace_bytes;
};

/// What can be made before graphs are captured: cuBLASLt's handle for the current device. Empty, or what went wrong.
std::string prepare_matmul();

/// alpha * a b^T (+ accumulate, of the result's type): no bias, no activation. Empty, or why it cannot be.
std::string launch(const MatmulProblem& problem, const MatmulResources& resources, cudaStream_t stream);

/// Device memory of so many bytes until the call returns, or null.
using Allocate = std::function<void*(int64_t bytes)>;

/// Before a launch, where times_algorithms() (cublaslt.h): times the algorithms of its GEMMs that are not known yet, and
/// waits for them. Operands are read, whatever they hold; nothing is written but memory that is asked for.
std::string time_matmul(const MatmulProblem& problem, const MatmulResources& resources, const Allocate& allocate,
                        cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
