// GEMMs by cuBLASLt: the copy that JAX has loaded, found when first asked for.
//
// Nothing here waits, allocates device memory or reads it. Descriptors are made for each call, in the host's memory; what
// the heuristics choose is kept for each problem.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "gemm.h"

namespace jaxlowprec {
namespace cuda {

/// Finds cuBLASLt and makes its handle for the device, which is the current one. Empty, or what is wrong.
std::string prepare_gemm(int device);

/// The outcome of a launch.
struct GemmLaunch {
  std::string problem;        // why there was none; else empty
  bool no_algorithm = false;  // the problem: cuBLASLt suggests none for this GEMM on this GPU
};

/// Launches a GEMM on the device, which is the current one.
GemmLaunch launch(const Gemm& gemm, int device, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
