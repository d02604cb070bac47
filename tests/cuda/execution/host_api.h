// The functions of the CUDA runtime that launches use. There is one device at a time; a stream is only a name, everything is
// done when the call returns.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "vector_types.h"

using cudaStream_t = struct CUstream_st*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

struct cudaLaunchAttribute;  // none is known
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);

namespace cuda_on_cpu {

struct Launch {
  const void* kernel;
  void (*call)(const void* parameters);
  const void* parameters;
  size_t parameter_bytes;
};
cudaError_t launch(const cudaLaunchConfig_t& config, const Launch& launch);
bool execute(const cudaLaunchConfig_t& config, const Launch& launch);  // false: a report ended it
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t blocks_per_multiprocessor(int* blocks, const void* kernel, int threads, size_t shared_bytes);

/// A kernel with its parameters.
template <class... Parameter>
struct Call {
  void (*kernel)(Parameter...);
  std::tuple<Parameter...> parameters;

  static void run(const void* call) {
    const Call& self = *static_cast<const Call*>(call);
    std::apply(self.kernel, self.parameters);
  }
};

}  // namespace cuda_on_cpu

template <class... Parameter, class... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameter...), Given&&... given) {
  static_assert((std::is_trivially_copyable_v<Parameter> && ...), "parameters are copied to the device as bytes");
  using Call = cuda_on_cpu::Call<Parameter...>;
  static_assert(sizeof(Call) <= 4096, "parameters of a kernel: at most 4 KB");
  const Call call{kernel, {std::forward<Given>(given)...}};
  return cuda_on_cpu::launch(*config, {reinterpret_cast<const void*>(kernel), Call::run, &call, sizeof call});
}

template <class... Parameter>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameter...), cudaFuncAttribute attribute, int value) {
  return cuda_on_cpu::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  return cuda_on_cpu::set_attribute(kernel, attribute, value);
}

/// What the test's device says; no block where a kernel may not have the shared memory.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel kernel, int threads, size_t shared_bytes) {
  return cuda_on_cpu::blocks_per_multiprocessor(blocks, reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}
