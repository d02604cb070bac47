// The largest finite magnitude and the root mean square of matrices; what is subnormal or not finite counts as zero.
//
// Data flow: 16-byte pieces -> their largest magnitude -> squares of the elements brought near 1 by a power of two, added up
// in float32 -> a thread's double -> the block's, into the workspace -> a block for each matrix adds up its parts.
// A square never overflows, and one that underflows is of an element 2^63 times less than its neighbour.
// Bytes moved per element: 2 or 4 read. The workspace is 16 bytes a part.
// Launch: blocks of 256 threads, one for each part, each going through tiles of its matrix; then one a matrix.
#pragma once

#include "../vectors.cuh"
#include "elements.cuh"
#include "statistics.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kMomentsThreads = 256, kMomentsPieces = 4;  // of 16 bytes, a thread and tile: loaded before the first is used

struct MomentsArguments {
  const void* x;
  int64_t size;  // of a matrix
  MomentsOfPart* found;
  float* result;
  uint32_t parts;  // of a matrix
};

struct MomentsShared {
  double energy[kMomentsThreads / 32];
  uint32_t largest[kMomentsThreads / 32];
};

/// Adds up the squares of the finite ones of some elements.
template <int kCount>
JLP_DEVICE void add_moments(float (&v)[kCount], MomentsOfPart& found) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = finite_magnitude(v[i]);
    largest = max(largest, bits), v[i] = Lanes<float>::from_bits(bits);
  }
  const uint32_t exponent = min(max(largest >> 23, 1u), 253u);
  const float unit = Lanes<float>::from_bits((254 - exponent) << 23), size = Lanes<float>::from_bits(exponent << 23);
  float energy = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) energy += v[i] * unit * (v[i] * unit);
  found.energy += static_cast<double>(energy) * size * size;
  found.largest = max(found.largest, largest);
}

/// The first thread gets what all threads of the block found.
JLP_DEVICE MomentsOfPart moments_of_block(MomentsOfPart found, MomentsShared& shared) {
  found.energy = sum_of_warp(found.energy), found.largest = __reduce_max_sync(0xFFFFFFFFu, found.largest);
  if (threadIdx.x % 32 == 0)
    shared.energy[threadIdx.x / 32] = found.energy, shared.largest[threadIdx.x / 32] = found.largest;
  __syncthreads();
  MomentsOfPart all = {};
  for (int warp = 0; threadIdx.x == 0 && warp < kMomentsThreads / 32; ++warp)
    all.energy += shared.energy[warp], all.largest = max(all.largest, shared.largest[warp]);
  return all;
}

template <ElementType kType>
static __global__ void __launch_bounds__(kMomentsThreads, 4) moments_kernel(const MomentsArguments a) {
  constexpr int kBytes = kElementBytes<kType>, kPieceElements = 16 / kBytes;
  const int64_t batch = blockIdx.x / a.parts;
  const uint32_t part = blockIdx.x % a.parts;
  const uint8_t* x = static_cast<const uint8_t*>(a.x) + batch * a.size * kBytes;
  // The elements before the first whole piece, and after the last one.
  const int64_t misaligned = reinterpret_cast<uintptr_t>(x) % 16 / kBytes;
  const int64_t head = misaligned ? min(kPieceElements - misaligned, a.size) : 0;
  const int64_t pieces = (a.size - head) / kPieceElements, tail = head + pieces * kPieceElements;
  MomentsOfPart found = {};
  if (part == 0) {
    float edge[2] = {threadIdx.x < head ? load_one<kType>(x, threadIdx.x) : 0.0f,
                     threadIdx.x < a.size - tail ? load_one<kType>(x, tail + threadIdx.x) : 0.0f};
    add_moments(edge, found);
  }
  const auto* from = reinterpret_cast<const uint4*>(x + head * kBytes);
  constexpr int64_t kTile = kMomentsThreads * kMomentsPieces;
  for (int64_t first = part * kTile + threadIdx.x; first < pieces; first += a.parts * kTile) {
    uint32_t words[4 * kMomentsPieces];
#pragma unroll
    for (int i = 0; i < kMomentsPieces; ++i) {
      const uint4 piece =
          first + i * kMomentsThreads < pieces ? __ldg(from + first + i * kMomentsThreads) : uint4{0, 0, 0, 0};
      words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
    }
    float v[kMomentsPieces * kPieceElements];
#pragma unroll
    for (int i = 0; i < 4 * kMomentsPieces; ++i) widen<kType>(words[i], &v[i * kPerWord<kType>]);
    add_moments(v, found);
  }
  const MomentsOfPart all = moments_of_block(found, block_shared<MomentsShared>());
  if (threadIdx.x == 0) a.found[blockIdx.x] = all;
}

static __global__ void __launch_bounds__(kMomentsThreads) moments_sum_kernel(const MomentsArguments a) {
  const MomentsOfPart* parts = a.found + static_cast<int64_t>(blockIdx.x) * a.parts;
  MomentsOfPart found = {};
  for (uint32_t part = threadIdx.x; part < a.parts; part += kMomentsThreads)
    found.energy += parts[part].energy, found.largest = max(found.largest, parts[part].largest);
  const MomentsOfPart all = moments_of_block(found, block_shared<MomentsShared>());
  if (threadIdx.x != 0) return;
  a.result[2 * blockIdx.x] = Lanes<float>::from_bits(all.largest);
  a.result[2 * blockIdx.x + 1] = static_cast<float>(sqrt(all.energy / static_cast<double>(a.size)));
}

}  // namespace cuda
}  // namespace jaxlowprec
