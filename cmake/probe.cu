// Compiled and linked when the build is configured: shows that a CUDA compiler works here, with this host compiler.
#include <cuda_runtime.h>

static __global__ void doubled(float* x) { x[threadIdx.x] *= 2; }

cudaError_t launch(float* x, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = 1;
  config.blockDim = 32;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, doubled, x);
}
