#include "host_api.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "machine.h"
#include "shadow.h"
#include "testing.h"

namespace cuda_on_cpu {
namespace {

constexpr int kShared = 48 << 10;      // that a block may have without asking
constexpr int kReservedShared = 1024;  // of every block, for the system

int queries = 0, settings = 0;  // of occupancy, of shared memory

cudaError_t last_error = cudaSuccess;
cudaError_t done(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

std::map<const void*, int>& shared_limits() {
  static std::map<const void*, int> limits;
  return limits;
}

int shared_limit(const void* kernel) {
  const auto found = shared_limits().find(kernel);
  return found == shared_limits().end() ? kShared : std::max(kShared, found->second);
}

bool is_valid(const cudaLaunchConfig_t& config) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  return grid.x && grid.y && grid.z && grid.x <= 0x7FFFFFFFu && grid.y <= 65535 && grid.z <= 65535 && threads &&
         threads <= kMaxThreads && block.z <= 64;
}

}  // namespace

int Device::shared_per_multiprocessor() const {
  switch (architecture) {
    case 800:
    case 870: return 164 << 10;
    case 860:
    case 890:
    case 1200: return 100 << 10;
    default: return 228 << 10;
  }
}
int Device::shared_per_block_limit() const { return shared_per_multiprocessor() - kReservedShared; }
int Device::threads_per_multiprocessor() const {
  return architecture == 860 || architecture == 890 || architecture == 1200 ? 1536 : 2048;
}

Device& device() {
  static Device device;
  return device;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const Launch& launch) {
  if (config.numAttrs) return done(cudaErrorNotSupported);
  if (!is_valid(config)) return done(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > static_cast<size_t>(shared_limit(launch.kernel))) return done(cudaErrorInvalidValue);
  return done(execute(config, launch) ? cudaSuccess : cudaErrorLaunchFailure);
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;  // a hint
  if (value < 0 || value > device().shared_per_block_limit()) return done(cudaErrorInvalidValue);
  ++settings;
  shared_limits()[kernel] = value;
  return cudaSuccess;
}

int occupancy_queries() { return queries; }
int attribute_settings() { return settings; }

cudaError_t blocks_per_multiprocessor(int* blocks, const void* kernel, int threads, size_t shared_bytes) {
  ++queries;
  if (threads <= 0 || threads > static_cast<int>(kMaxThreads)) return done(cudaErrorInvalidValue);
  const int by_threads = device().threads_per_multiprocessor() / threads;
  const int by_shared = device().shared_per_multiprocessor() / (static_cast<int>(shared_bytes) + kReservedShared);
  const int by_resources = std::min({by_threads, by_shared, 32});
  *blocks = device().resident_blocks ? device().resident_blocks : by_resources;
  if (shared_bytes > static_cast<size_t>(shared_limit(kernel))) *blocks = 0;
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

using cuda_on_cpu::device;
using cuda_on_cpu::done;

namespace {
struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
const ErrorText& text_of(cudaError_t error) {
  static constexpr ErrorText kUnknown{cudaSuccess, "unrecognized error code", "unrecognized error code"};
  for (const ErrorText& known : kErrors)
    if (known.error == error) return known;
  return kUnknown;
}
}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }
cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }

cudaError_t cudaGetDevice(int* index) { return *index = device().index, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = device().index + 1, cudaSuccess; }
cudaError_t cudaSetDevice(int index) { return index != device().index ? done(cudaErrorInvalidDevice) : cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  if (index != device().index) return done(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return *value = cuda_on_cpu::kMaxThreads, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: return *value = cuda_on_cpu::kShared, cudaSuccess;
    case cudaDevAttrWarpSize: return *value = cuda_on_cpu::kWarpSize, cudaSuccess;
    case cudaDevAttrMultiProcessorCount: return *value = device().multiprocessors, cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return *value = device().threads_per_multiprocessor(), cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: return *value = device().architecture / 100, cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: return *value = device().architecture / 10 % 10, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return *value = device().shared_per_multiprocessor(), cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = device().shared_per_block_limit(), cudaSuccess;
  }
  return done(cudaErrorInvalidValue);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (!cuda_on_cpu::host_writes(to, bytes)) return done(cudaErrorInvalidValue);
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (!cuda_on_cpu::host_reads(from, bytes) || !cuda_on_cpu::host_writes(to, bytes)) return done(cudaErrorInvalidValue);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
