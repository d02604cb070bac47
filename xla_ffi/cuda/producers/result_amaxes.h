// The amaxes of what a producer writes, which its kernel raises.
#pragma once

#include <cuda_runtime.h>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

/// Zeroes those of a result that are wanted, of `batch` matrices.
inline cudaError_t clear_amaxes(const ResultAmaxes& amaxes, int64_t batch, cudaStream_t stream) {
  for (uint32_t* amax : {amaxes.plain, amaxes.rotated}) {
    if (!amax) continue;
    const cudaError_t error = cudaMemsetAsync(amax, 0, batch * sizeof *amax, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxlowprec
