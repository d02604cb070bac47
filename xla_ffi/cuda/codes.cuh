// Codes in registers to numbers: eight at a time, all exact.
#pragma once

#include "../numerics/row_scales.h"
#include "vectors.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr uint32_t kBf16PairOf2To126 = 0x7E807E80u;

/// Elements i and i + 4 of a word's eight E2M1 codes as bfloat16 times 2^-126: sign, exponent and mantissa at their places
/// in a bfloat16, whose exponent's bias is greater by 126. A 0.5 is subnormal there as it is in E2M1, so only a bfloat16
/// multiplication, which keeps subnormals, may take it further.
template <int i>
JLP_DEVICE uint32_t e2m1_pair(uint32_t codes) {
  const uint32_t top = codes << (12 - 4 * i);  // the pair's codes at the top of either half
  return ((top >> 6) & 0x01C001C0u) | (top & 0x80008000u);
}

template <int i>
JLP_DEVICE void decode_e2m1_pair(uint32_t codes, float (&v)[8]) {
  float pair[2];
  widen<ElementType::kBF16>(multiply_bf16x2(e2m1_pair<i>(codes), kBf16PairOf2To126), pair);
  v[i] = pair[0], v[i + 4] = pair[1];
}

/// Two 8-bit codes in the low bytes.
template <class Element>
JLP_DEVICE void decode_float8_pair(uint32_t two, float* v) {
  if constexpr (Element::kUpperByteOfFloat16) {  // float16's upper half
    widen<ElementType::kF16>((two & 0xFFu) << 8 | (two & 0xFF00u) << 16, v);
  } else if constexpr (kHasFloat8Conversion<Element>) {
    widen<ElementType::kF16>(f16x2_of_float8x2_hardware<Element>(two), v);
  } else {
    v[0] = float8_decode<Element, float>(two & 0xFFu), v[1] = float8_decode<Element, float>((two >> 8) & 0xFFu);
  }
}

/// Four 8-bit integers of a word: each in the low byte of 2^23, after a change from the range of -128 on to that of 0 on.
JLP_DEVICE void decode_int8_word(uint32_t word, float* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = Lanes<float>::from_bits(__byte_perm(word ^ 0x80808080u, 0x4B000000u, 0x7440u | i)) - 8388736.0f;  // 2^23 + 128
}

/// Eight codes, as they lie in memory.
template <class Element>
struct EightCodes {
  static constexpr int kWords = Element::kPacked ? 1 : 2;
  uint32_t words[kWords];

  __device__ __forceinline__ void decode(float (&v)[8]) const {
    if constexpr (Element::kPacked) {
      decode_e2m1_pair<0>(words[0], v), decode_e2m1_pair<1>(words[0], v);
      decode_e2m1_pair<2>(words[0], v), decode_e2m1_pair<3>(words[0], v);
    } else if constexpr (std::is_same_v<Element, Int8>) {
      decode_int8_word(words[0], v), decode_int8_word(words[1], v + 4);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) decode_float8_pair<Element>(words[i / 4] >> (i % 4 * 8), &v[i]);
    }
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
