// Elements to codes: scaled, rounded, packed into bytes. What scales them and where random bytes come from is the callers'.
#pragma once

#include <type_traits>

#include "../numerics/e2m1.h"
#include "../numerics/float8.h"
#include "kernels.h"
#include "tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kGroupBytes = kGroup / 2;  // of 4-bit codes

// --- E2M1

/// An element's code without its sign, plus kCodeOffset.
template <bool kStochastic, bool kSaturate>
JLP_RULE U32 code_bits(F32 y, U32 byte) {
  if (kStochastic) return e2m1_magnitude_stochastic(absolute(y), byte);
  return e2m1_magnitude_bits(kSaturate ? L::min(absolute(y), L::splat(kE2M1Max)) : absolute(y));
}
template <bool kStochastic>
constexpr uint32_t kCodeOffset = kStochastic ? 0u : kE2M1MagicBits;  // its low byte is 0

/// Stores 8 * kLanes codes: those of `low` and `high`, whose signs are still to come, meet in bytes.
JLP_RULE void store_nibbles(const U32 (&code)[4], const F32 (&low)[4], const F32 (&high)[4], uint8_t* data) {
  U8 packed = pack_bytes(code[0], code[1], code[2], code[3]);
  packed |= pack_signs(low[0], low[1], low[2], low[3]) >> 4;
  packed |= pack_signs(high[0], high[1], high[2], high[3]);
  store(data, in_order(packed));
}

/// kGroup elements to kGroupBytes. `encode` is what each 16 are multiplied by, `random` holds as many bytes.
template <class E, bool kStochastic, bool kSaturate>
JLP_RULE void encode_row_group(const typename E::Storage* x, const float* encode, const uint8_t* random, uint8_t* data) {
  JLP_UNROLL(2)
  for (int half = 0; half < 2; ++half) {
    U32 code[4];
    F32 even[4], odd[4];
    JLP_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      const int j = 4 * half + k;
      const Pair pair = E::load_pair(x + 2 * kLanes * j);
      const F32 factor = expand_blocks(encode, j);
      const U32 bytes = kStochastic ? load_u16(random + 2 * kLanes * j) : U32{};
      even[k] = L::scaled(pair.even, factor);
      odd[k] = L::scaled(pair.odd, factor);
      code[k] = code_bits<kStochastic, kSaturate>(even[k], bytes & 0xFFu) +
                (code_bits<kStochastic, kSaturate>(odd[k], bytes >> 8) << 4);
    }
    store_nibbles(code, even, odd, data + 4 * kLanes * half);
  }
}

/// Groups whose elements may exceed the largest code; 16 elements whose factor is NaN get codes 0.
template <class E, bool kStochastic>
__attribute__((noinline)) void encode_row_group_saturating(const typename E::Storage* x, const float* encode,
                                                           const uint8_t* random, uint8_t* data) {
  encode_row_group<E, kStochastic, true>(x, encode, random, data);
  for (int b = 0; b < kLanes; ++b)
    if (encode[b] != encode[b]) memset(data + 8 * b, 0, 8);
}

/// The codes of one group, by its 16 random bytes a block.
template <class E, bool kStochastic>
JLP_RULE void quantize_row_group(const typename E::Storage* x, const float* encode, bool ordinary, const uint8_t* random,
                                 uint8_t* data) {
  if (__builtin_expect(ordinary, 1))
    encode_row_group<E, kStochastic, false>(x, encode, random, data);
  else
    encode_row_group_saturating<E, kStochastic>(x, encode, random, data);
}

/// 4 * kLanes columns of two rows, the first row's codes in the low halves of the bytes; saturating. `encode` is what each
/// column is multiplied by, `random` has a row's byte of each column in the low bits of its lanes.
template <class E, bool kStochastic, class Random>
JLP_RULE void encode_row_pair(const typename E::Storage* first, const typename E::Storage* second, const float* encode,
                              Random random, uint8_t* data) {
  U32 code[4];
  F32 low[4], high[4];
  JLP_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    const F32 factor = load<F32>(encode + kLanes * k);
    low[k] = L::scaled(E::load_lanes(first + kLanes * k), factor);
    high[k] = L::scaled(E::load_lanes(second + kLanes * k), factor);
    code[k] =
        code_bits<kStochastic, true>(low[k], random(0, k)) + (code_bits<kStochastic, true>(high[k], random(1, k)) << 4);
  }
  store_nibbles(code, low, high, data);
}

// --- 8-bit floats

/// 4 * kLanes elements of a row; saturating. `factor(k)` is what the k-th kLanes are multiplied by, `random(k)` has their
/// bytes.
template <class E, class Element, bool kStochastic, class Factor, class Random>
JLP_RULE void encode_float8(const typename E::Storage* x, Factor factor, Random random, uint8_t* data) {
  constexpr uint16_t kOffset = kStochastic ? 0 : kFloat8Offset<Element>;
  U32 code[4];
  F32 y[4];
  JLP_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    y[k] = L::scaled(E::load_lanes(x + kLanes * k), factor(k));
    const F32 a = absolute(y[k]);
    code[k] = kStochastic ? float8_magnitude_stochastic<Element>(a, random(k))
                          : float8_magnitude_bits<Element>(L::min(a, L::splat(Element::kMax)));
  }
  const U8 packed = pack_bytes_less(code[0], code[1], code[2], code[3], kOffset);
  store(data, in_order(packed | pack_signs(y[0], y[1], y[2], y[3])));
}

// --- bytes of rows to bytes of columns

/// 16 rows of 16 bytes, `from_stride` apart, transposed.
JLP_RULE void transpose_bytes(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
  Bytes16 v[16];
  JLP_UNROLL(16)
  for (int i = 0; i < 16; ++i) v[i] = load<Bytes16>(from + i * from_stride);
  transpose(v);
  JLP_UNROLL(16)
  for (int i = 0; i < 16; ++i) store(to + i * to_stride, v[i]);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
