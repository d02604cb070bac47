#include "errors.h"

namespace jaxlowprec {
namespace cuda {
namespace {

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

std::string old_driver(int driver) {
  return "the NVIDIA driver supports CUDA " + version(driver) + ", jaxlowprec was built with " + version(CUDART_VERSION) +
         ": update the driver, or build jaxlowprec with a CUDA that it supports";
}

std::string unsupported_device() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return "this GPU has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
         ", for which this build of jaxlowprec has no code (`jaxlowprec info` lists what it has): build it with "
         "JAXLOWPREC_CUDA_ARCHS=" +
         std::to_string(major) + std::to_string(minor) + ", or pass implementation=\"reference\"";
}

}  // namespace

std::string reason(cudaError_t status) {
  cudaGetLastError();
  std::string words = std::string(cudaGetErrorName(status)) + ", " + cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver || status == cudaErrorUnsupportedPtxVersion) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    words += "; " + old_driver(driver);
  }
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
    words += "; " + unsupported_device();
  if (status == cudaErrorMemoryAllocation) words += "; lower XLA_PYTHON_CLIENT_MEM_FRACTION, or work on smaller arrays";
  return words;
}

std::string driver_problem() {
  int driver = 0;
  const cudaError_t status = cudaDriverGetVersion(&driver);
  if (status != cudaSuccess || driver == 0) return "there is no NVIDIA driver here";
  // Within a major version a newer runtime works on an older driver.
  return driver / 1000 < CUDART_VERSION / 1000 ? old_driver(driver) : "";
}

}  // namespace cuda
}  // namespace jaxlowprec
