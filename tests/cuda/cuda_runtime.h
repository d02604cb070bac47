// What stands in for CUDA's header when the tests execute kernels on a CPU: see README.md.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#include "execution/collectives.h"
#include "execution/host_api.h"
#include "execution/intrinsics.h"
#include "execution/testing.h"
#include "execution/vector_types.h"

// Constant while a thread runs, so they are declared so. Only who switches threads writes them: execution/machine.cc.
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#if defined(JLP_TEST_CUDA_ARCH)
static const bool cuda_on_cpu_architecture = (cuda_on_cpu::device().architecture = JLP_TEST_CUDA_ARCH, true);
#endif
