// GEMMs by cuBLASLt: the copy that JAX has loaded, found when first asked for.
//
// Nothing here waits, allocates device memory or reads it, but for time_algorithms. Descriptors are made for each call, in
// the host's memory, which takes 0.1 microseconds; which algorithm is taken is kept for each problem.
#pragma once

#include <cuda_runtime.h>

#include <functional>
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

/// Whether the fastest of cuBLASLt's algorithms is to be taken: JAXLOWPREC_GEMM_ALGORITHM=timed. Then every GEMM is given to
/// time_algorithms before it is launched.
bool times_algorithms();

/// Times the algorithms of a GEMM on a stream that is not being captured, unless that was done before, and waits for them.
/// They run on operands that may hold anything; `move` gives the GEMM a result, a workspace, and alpha and beta if it has
/// them, of its own, or says why not.
GemmLaunch time_algorithms(const Gemm& gemm, int device, const std::function<std::string(Gemm&)>& move, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
