// What to tell the user when something on the GPU fails: the operation, its shape, CUDA's reason and, where there is one,
// the remedy.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../problems.h"

namespace jaxlowprec {
namespace cuda {

/// What failed, in words. Forgets the error, so that later calls do not find it again.
std::string reason(cudaError_t status);

/// Why nothing can run on a GPU here: no driver, or one too old for the CUDA runtime built in; empty if something can.
/// Touches no device.
std::string driver_problem();

template <class Problem>
std::string failure(const char* operation, const Problem& problem, const std::string& why) {
  return std::string("jaxlowprec ") + operation + " of [" + std::to_string(problem.batch) + ", " +
         std::to_string(problem.rows) + ", " + std::to_string(problem.columns) + "]: " + why;
}

}  // namespace cuda
}  // namespace jaxlowprec
