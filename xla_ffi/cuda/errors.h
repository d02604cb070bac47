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

/// The shape of what a problem is about: of matrices, or of as many elements.
template <class Problem>
auto shape_of(const Problem& p, int) -> decltype(p.rows, std::string()) {
  return std::to_string(p.batch) + ", " + std::to_string(p.rows) + ", " + std::to_string(p.columns);
}
template <class Problem>
std::string shape_of(const Problem& p, long) {
  return std::to_string(p.size);
}

template <class Problem>
std::string failure(const char* operation, const Problem& problem, const std::string& why) {
  return std::string("jaxlowprec ") + operation + " of [" + shape_of(problem, 0) + "]: " + why;
}

}  // namespace cuda
}  // namespace jaxlowprec
