// What the statistics' kernels have in common: eight elements from memory, magnitudes that count, sums of a warp.
#pragma once

#include "../vectors.cuh"

namespace jaxlowprec {
namespace cuda {

/// Magnitude bits; 0 for subnormal numbers and for those that are not finite.
JLP_DEVICE uint32_t finite_magnitude(float v) {
  const uint32_t bits = magnitude(v);
  return bits >= kMinNormalBits && bits < kInfinityBits ? bits : 0u;
}

template <ElementType kType>
JLP_DEVICE float load_one(const void* from, int64_t index) {
  float v[2] = {};
  if constexpr (kType == ElementType::kF32)
    widen<kType>(static_cast<const uint32_t*>(from)[index], v);
  else
    widen<kType>(static_cast<const uint16_t*>(from)[index], v);
  return v[0];
}

/// Eight elements as they lie in memory.
template <ElementType kType>
struct EightElements {
  static constexpr int kWords = 8 / kPerWord<kType>;
  uint32_t words[kWords];

  /// The first `count` of those at `index`, zeros behind them. whole: all or none of them, and 16 bytes aligned.
  __device__ __forceinline__ void load(const void* from, int64_t index, int64_t count, bool whole) {
    if (whole) {
      const auto* pieces = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(from) + index * kElementBytes<kType>);
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 piece = count > 0 ? __ldg(pieces + i) : uint4{0, 0, 0, 0};
        words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; i += kPerWord<kType>) {
      uint32_t& word = words[i / kPerWord<kType>];
      if constexpr (kType == ElementType::kF32) {
        word = i < count ? static_cast<const uint32_t*>(from)[index + i] : 0u;
      } else {
        const auto* x = static_cast<const uint16_t*>(from) + index + i;
        word = i < count ? x[0] : 0u;
        if (i + 1 < count) word |= static_cast<uint32_t>(x[1]) << 16;
      }
    }
  }

  __device__ __forceinline__ void decode(float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) widen<kType>(words[i], &v[i * kPerWord<kType>]);
  }
};

/// Always in the same order.
JLP_DEVICE double sum_of_warp(double v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
  return v;
}

}  // namespace cuda
}  // namespace jaxlowprec
