// A launch in a line, for the tests of the machine itself.
#pragma once

#include <cuda_runtime.h>

namespace cuda_on_cpu {

struct Shape {
  dim3 grid = 1, block = 32;
  size_t shared_bytes = 0;
};

template <class... Parameter, class... Given>
cudaError_t run(const Shape& shape, void (*kernel)(Parameter...), Given... given) {
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid, config.blockDim = shape.block, config.dynamicSmemBytes = shape.shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, given...);
}

}  // namespace cuda_on_cpu
