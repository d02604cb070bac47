// Launches of kernels whose blocks go through tiles: as many blocks as the device holds at once, or fewer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace jaxlowprec {
namespace cuda {

/// Whether kernels can number the tiles of all matrices in 32 bits, also one grid further.
inline bool fits_tiles(int64_t batch, int64_t down, int64_t across) {
  constexpr int64_t kMost = INT32_MAX;
  return down <= kMost && across <= kMost && batch <= kMost && down * across <= kMost && down * across * batch <= kMost;
}

/// `blocks` is how many a multiprocessor is expected to hold.
template <class Shared, class... Parameter, class... Given>
cudaError_t launch_over_tiles(void (*kernel)(Parameter...), int threads, int blocks, uint32_t tiles, cudaStream_t stream,
                              const Given&... given) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && sizeof(Shared) > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  const uint32_t held = static_cast<uint32_t>(multiprocessors * blocks);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tiles < held ? tiles : held);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, given...);
}

}  // namespace cuda
}  // namespace jaxlowprec
