// Elements in registers: words of two 16-bit or one 32-bit element, and eight numbers to and from memory.
#pragma once

#include "../problems.h"
#include "intrinsics.cuh"

namespace jaxlowprec {
namespace cuda {

template <ElementType kType>
constexpr int kElementBytes = kType == ElementType::kF32 ? 4 : 2;

/// Elements in a word of 4 bytes.
template <ElementType kType>
constexpr int kPerWord = 4 / kElementBytes<kType>;

/// Calls visit with the type as a constant.
template <class Visit>
auto with_type(ElementType type, Visit visit) {
  switch (type) {
    case ElementType::kBF16: return visit(std::integral_constant<ElementType, ElementType::kBF16>());
    case ElementType::kF16: return visit(std::integral_constant<ElementType, ElementType::kF16>());
    default: return visit(std::integral_constant<ElementType, ElementType::kF32>());
  }
}

template <ElementType kType>
JLP_DEVICE void widen(uint32_t word, float* v) {
  if constexpr (kType == ElementType::kF32) {
    v[0] = Lanes<float>::from_bits(word);
  } else if constexpr (kType == ElementType::kBF16) {
    v[0] = Lanes<float>::from_bits(word << 16), v[1] = Lanes<float>::from_bits(word & 0xFFFF0000u);
  } else {
    v[0] = f16_to_float(word & 0xFFFFu), v[1] = f16_to_float(word >> 16);
  }
}

/// Rounded to nearest even.
template <ElementType kType>
JLP_DEVICE uint32_t narrow(const float* v) {
  if constexpr (kType == ElementType::kF32) {
    return Lanes<float>::bits(v[0]);
  } else if constexpr (kType == ElementType::kBF16) {
    return bf16x2(v[0], v[1]);
  } else {
    return f16x2(v[0], v[1]);
  }
}

/// Element `index` of an array on its own, rounded to nearest even.
template <ElementType kType>
JLP_DEVICE void store_one(void* to, int64_t index, float value) {
  if constexpr (kType == ElementType::kF32) {
    static_cast<float*>(to)[index] = value;
  } else {
    const float pair[2] = {value, 0.0f};
    static_cast<uint16_t*>(to)[index] = static_cast<uint16_t>(narrow<kType>(pair));
  }
}

/// The first `count` of eight numbers to elements `index` ... of an array. kWhole: all of them, and 16 bytes aligned.
template <ElementType kType, bool kWhole>
JLP_DEVICE void store_eight(void* to, int64_t index, const float (&v)[8], int64_t count) {
  if constexpr (kWhole) {
    uint32_t words[8 / kPerWord<kType>];
#pragma unroll
    for (int i = 0; i < 8 / kPerWord<kType>; ++i) words[i] = narrow<kType>(&v[i * kPerWord<kType>]);
    uint4* vectors = reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + index * kElementBytes<kType>);
#pragma unroll
    for (int i = 0; i < 2 / kPerWord<kType>; ++i)
      vectors[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) store_one<kType>(to, index + i, v[i]);
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
