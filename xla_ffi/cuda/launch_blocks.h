// A launch in a line, and the arithmetic of grids.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace jaxlowprec {
namespace cuda {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

struct Blocks {
  int64_t x, y = 1, z = 1;  // how many
  int threads = 256;
  size_t shared_bytes = 0;
};

/// Lets a kernel have so much shared memory. The driver is told once for each kernel and device, and again of more.
inline cudaError_t allow_shared(const void* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;  // every kernel may have this much without an attribute
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  size_t& most = allowed[{kernel, device}];
  if (bytes <= most) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) most = bytes;
  return error;
}

/// Launches a kernel that is allowed its shared memory.
template <class... Parameter, class... Given>
cudaError_t launch_allowed(void (*kernel)(Parameter...), const Blocks& blocks, cudaStream_t stream, Given&&... given) {
  if (blocks.x > INT32_MAX || blocks.y > 65535 || blocks.z > 65535) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks.x), static_cast<unsigned>(blocks.y), static_cast<unsigned>(blocks.z));
  config.blockDim = dim3(static_cast<unsigned>(blocks.threads));
  config.dynamicSmemBytes = blocks.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Given>(given)...);
}

template <class... Parameter, class... Given>
cudaError_t launch_blocks(void (*kernel)(Parameter...), const Blocks& blocks, cudaStream_t stream, Given&&... given) {
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), blocks.shared_bytes);
  return error == cudaSuccess ? launch_allowed(kernel, blocks, stream, std::forward<Given>(given)...) : error;
}

}  // namespace cuda
}  // namespace jaxlowprec
