// From a tensor's sums to the vector of its statistics: the rules of ../../statistics_vector.h, and the CPU's order of sums.
//
// Data flow: 256 counts by scale to shared memory -> one thread finds the scales in use -> 32 threads add up an octave each.
// Bytes moved per tensor: 1.3 KB read, 0.4 KB written.
// Launch: a block of 256 threads for each tensor.
#pragma once

#include "../../statistics_vector.h"
#include "../intrinsics.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kVectorThreads = 256;
constexpr int kVectorFormats = 512;  // of one launch: kernels take their scalings as arguments

struct VectorsArguments {
  const float *sums, *amax, *rms, *outliers, *channels;
  float* result;
  int64_t formats;       // a tensor's format is its number modulo so many
  int32_t first, count;  // the formats that this launch does
  uint8_t scalings[kVectorFormats];
};

struct VectorsShared {
  float by_scale[kSumsScales];
  int32_t below[kSumsScales];
  ScalesInUse scales;
};

static __global__ void __launch_bounds__(kVectorThreads) vectors_kernel(const VectorsArguments a) {
  static_assert(kVectorThreads == kSumsScales, "a thread has a bin of scales");
  VectorsShared& shared = block_shared<VectorsShared>();
  const int format = blockIdx.x % a.count, i = threadIdx.x;
  const int64_t tensor = static_cast<int64_t>(blockIdx.x / a.count) * a.formats + a.first + format;
  const Scaling scaling = static_cast<Scaling>(a.scalings[format]);
  const float* sums = a.sums + tensor * kSums;
  float* result = a.result + tensor * kVector;
  shared.by_scale[i] = sums[kSumsScalesFrom + i];
  __syncthreads();
  if (i == 0) {
    const KnownOfTensor known{a.amax[tensor], a.rms[tensor], a.outliers[tensor], nullptr};
    const ScalesInUse scales = scales_in_use(scaling, shared.by_scale);
    write_scalars(sums, known, scales, result);
    shared.scales = scales;
  }
  __syncthreads();
  shared.below[i] = octaves_below(shared.scales, scale_bin(scaling, i));
  if (i < kSumsCodes) result[kVectorCodesFrom + i] = sums[kSumsCodesFrom + i] / sums[0];
  if (i < 2 * kChannels) result[kVectorChannelsFrom + i] = a.channels[tensor * 2 * kChannels + i];
  __syncthreads();
  if (i >= kOctaves) return;
  float share = 0.0f;
  for (int bin = 0; bin < kSumsScales; ++bin)
    if (shared.below[bin] == i && shared.by_scale[bin] > 0) share += shared.by_scale[bin] / shared.scales.blocks;
  result[kVectorOctavesFrom + i] = share;
}

}  // namespace cuda
}  // namespace jaxlowprec
