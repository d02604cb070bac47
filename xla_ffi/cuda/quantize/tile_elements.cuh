// Input elements as the kernels hold them: packed words of the types that can be quantised, and sixteens.
#pragma once

#include "../../problems.h"
#include "../intrinsics.cuh"

namespace jaxlowprec {
namespace cuda {

JLP_DEVICE float as_float(uint32_t bits) { return Lanes<float>::from_bits(bits); }
JLP_DEVICE uint32_t as_bits(float x) { return Lanes<float>::bits(x); }

// Of two elements in a word: values, packing (rounded to nearest), sign bits of what is negative and not zero. kInfinity has
// an element's bits at the top of a word.
struct BF16 {
  static constexpr ElementType kType = ElementType::kBF16;
  static constexpr int kBytes = 2;
  static constexpr uint32_t kInfinity = 0x7F800000u;
  using Storage = uint16_t;
  JLP_DEVICE float low(uint32_t word) { return as_float(word << 16); }
  JLP_DEVICE float high(uint32_t word) { return as_float(word & 0xFFFF0000u); }
  JLP_DEVICE uint32_t pack(float low, float high) { return bf16x2(low, high); }
  JLP_DEVICE uint32_t negative(uint32_t word) { return negative_bf16x2(word); }
  JLP_DEVICE uint32_t float_bits(uint32_t magnitude) { return magnitude << 16; }
  JLP_DEVICE float round(float x) { return low(bf16x2(x, 0.0f)); }
};
struct F16 {
  static constexpr ElementType kType = ElementType::kF16;
  static constexpr int kBytes = 2;
  static constexpr uint32_t kInfinity = 0x7C000000u;
  using Storage = uint16_t;
  JLP_DEVICE float low(uint32_t word) { return f16_to_float(word & 0xFFFFu); }
  JLP_DEVICE float high(uint32_t word) { return f16_to_float(word >> 16); }
  JLP_DEVICE uint32_t pack(float low, float high) { return f16x2(low, high); }
  JLP_DEVICE uint32_t negative(uint32_t word) { return negative_f16x2(word); }
  JLP_DEVICE uint32_t float_bits(uint32_t magnitude) { return as_bits(f16_to_float(magnitude)); }
  JLP_DEVICE float round(float x) { return low(f16x2(x, 0.0f)); }
};
struct F32 {
  static constexpr ElementType kType = ElementType::kF32;
  static constexpr int kBytes = 4;
  static constexpr uint32_t kInfinity = kInfinityBits;
  using Storage = uint32_t;
  JLP_DEVICE float round(float x) { return x; }
};

/// 16 elements that are neighbours along the quantised axis.
template <class E>
struct Sixteen {
  static constexpr int kWords = 4 * E::kBytes;
  static constexpr int kPieces = kWords / 4;  // of 16 bytes
  uint32_t words[kWords];
};

/// Element i, which must be known at compile time.
template <class E>
JLP_DEVICE float value(const Sixteen<E>& sixteen, int i) {
  if constexpr (E::kBytes == 4)
    return as_float(sixteen.words[i]);
  else
    return i % 2 ? E::high(sixteen.words[i / 2]) : E::low(sixteen.words[i / 2]);
}

template <class E>
JLP_DEVICE void set_piece(Sixteen<E>& sixteen, int piece, uint4 words) {
  sixteen.words[4 * piece] = words.x, sixteen.words[4 * piece + 1] = words.y;
  sixteen.words[4 * piece + 2] = words.z, sixteen.words[4 * piece + 3] = words.w;
}

/// Magnitude bits, as of float32, of the largest of some words of elements. They may be those of a subnormal number.
template <class E, int kWords>
JLP_DEVICE uint32_t magnitude_bits(const uint32_t (&words)[kWords]) {
  constexpr uint32_t kMask = E::kBytes == 4 ? kMagnitudeBits : 0x7FFF7FFFu;
  uint32_t most = words[0] & kMask;
  if constexpr (E::kBytes == 4) {
#pragma unroll
    for (int i = 1; i < kWords; ++i) most = max(most, words[i] & kMask);
    return most;
  } else {
#pragma unroll
    for (int i = 1; i + 1 < kWords; i += 2) most = __vimax3_u16x2(most, words[i] & kMask, words[i + 1] & kMask);
    if constexpr (kWords % 2 == 0) most = __vmaxu2(most, words[kWords - 1] & kMask);
    return E::float_bits(max(most & 0xFFFFu, most >> 16));
  }
}

/// Calls visit with the traits of an element type: on the host, to choose a kernel.
template <class Visit>
auto with_element(ElementType type, Visit visit) {
  switch (type) {
    case ElementType::kBF16: return visit(BF16{});
    case ElementType::kF16: return visit(F16{});
    default: return visit(F32{});
  }
}

/// Elements [0, count) of a sixteen from memory, zeros after them.
template <class E>
JLP_DEVICE Sixteen<E> load_sixteen(const typename E::Storage* x, int count, bool aligned) {
  Sixteen<E> sixteen;
  if (aligned && count >= 16) {
#pragma unroll
    for (int i = 0; i < Sixteen<E>::kPieces; ++i) set_piece(sixteen, i, __ldg(reinterpret_cast<const uint4*>(x) + i));
    return sixteen;
  }
#pragma unroll
  for (int i = 0; i < Sixteen<E>::kWords; ++i) {
    constexpr int kElements = 4 / E::kBytes;
    uint32_t word = kElements * i < count ? x[kElements * i] : 0u;
    if constexpr (kElements == 2) word |= 2 * i + 1 < count ? static_cast<uint32_t>(x[2 * i + 1]) << 16 : 0u;
    sixteen.words[i] = word;
  }
  return sixteen;
}

}  // namespace cuda
}  // namespace jaxlowprec
