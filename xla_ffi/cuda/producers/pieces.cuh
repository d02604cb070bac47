// What a thread of the producers' kernels loads and stores at once: 16 bytes of elements, or one element where arrays are
// not aligned or rows are not whole pieces.
#pragma once

#include "../vectors.cuh"

namespace jaxlowprec {
namespace cuda {

/// `kWhole`: 16 bytes, aligned; else one element. A piece has an index, counted in pieces.
template <ElementType kType, bool kWhole>
struct Piece {
  static constexpr int kCount = kWhole ? 16 / kElementBytes<kType> : 1;
  using Narrow = std::conditional_t<kType == ElementType::kF32, uint32_t, uint16_t>;
  using Storage = std::conditional_t<kWhole, uint4, Narrow>;
  using Values = float[kCount];

  __device__ __forceinline__ static Storage load(const void* from, int64_t index) {
    return __ldg(static_cast<const Storage*>(from) + index);
  }
  /// Of an array that the kernel writes, too: not through the read-only cache.
  __device__ __forceinline__ static Storage load_written(const void* from, int64_t index) {
    return static_cast<const Storage*>(from)[index];
  }
  __device__ __forceinline__ static void store(void* to, int64_t index, Storage piece) {
    static_cast<Storage*>(to)[index] = piece;
  }

  __device__ __forceinline__ static void decode(Storage piece, Values& v) {
    if constexpr (kWhole) {
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) widen<kType>(words[i], &v[i * kPerWord<kType>]);
    } else {
      float pair[2];
      widen<kType>(piece, pair);
      v[0] = pair[0];
    }
  }

  /// Each rounded to nearest even.
  __device__ __forceinline__ static Storage encode(const Values& v) {
    if constexpr (kWhole) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = narrow<kType>(&v[i * kPerWord<kType>]);
      return make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      const float pair[2] = {v[0], 0.0f};
      return static_cast<Storage>(narrow<kType>(pair));
    }
  }

  /// As many float32, such as weights, at the elements of a piece.
  __device__ __forceinline__ static void load_floats(const float* from, int64_t index, Values& v) {
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) set_four(v, i, __ldg(reinterpret_cast<const uint4*>(from + index * kCount + i)));
    } else {
      v[0] = __ldg(from + index);
    }
  }

  /// To and from where the same thread reads them again, which __ldg must not.
  __device__ __forceinline__ static void store_floats(float* to, const Values& v) {
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4)
        reinterpret_cast<uint4*>(to)[i / 4] = Piece<ElementType::kF32, true>::encode({v[i], v[i + 1], v[i + 2], v[i + 3]});
    } else {
      to[0] = v[0];
    }
  }
  __device__ __forceinline__ static void load_written(const float* from, Values& v) {
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) set_four(v, i, reinterpret_cast<const uint4*>(from)[i / 4]);
    } else {
      v[0] = from[0];
    }
  }

 private:
  __device__ __forceinline__ static void set_four(Values& v, int i, uint4 four) {
    float values[4];
    Piece<ElementType::kF32, true>::decode(four, values);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[i + j] = values[j];
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
