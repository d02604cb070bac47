// The amaxes of what a producer wrote: a pass over the result, that the L2 cache holds where it is small enough.
#pragma once

#include "../launch.h"

namespace jaxlowprec {
namespace cuda {

/// A matrix of the result has `size` elements.
inline cudaError_t launch_amaxes(const ResultAmaxes& wanted, const void* result, ElementType type, int64_t batch,
                                 int64_t size, int64_t columns, cudaStream_t stream) {
  if (!wanted.wanted()) return cudaSuccess;
  const int64_t rows = columns ? size / columns : 0;
  return launch(AmaxProblem{result, type, batch, rows, columns, wanted.plain, wanted.rotated, wanted.sign_mask}, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
