// Elements to codes: scaled, rounded, packed into bytes. Callers supply the scales and the random bytes.
#pragma once

#include <type_traits>
#include <utility>

#include "../../numerics/e2m1.h"
#include "../../numerics/float8.h"
#include "../../problems.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kPacketBytes = kPacket / 2;  // of 4-bit codes

/// Calls visit with each number, a std::integral_constant.
template <class Visit, int... I>
JLP_RULE void for_each_place(Visit visit, std::integer_sequence<int, I...>) {
  (visit(std::integral_constant<int, I>{}), ...);
}

// --- E2M1

/// e2m1_magnitude_stochastic by the byte at kShift in the lanes of `random`.
template <int kShift>
JLP_RULE U32 stochastic_code_bits(F32 a, U32 random) {
#if defined(JLP_ISA_AVX512) && !defined(JLP_EMULATE_AVX512)
  // Adding 1, rounded towards zero, turns a < 1 into fixed point; from 1 on, a's own bits grow twice as fast.
  const __m512 kept = _mm512_min_ps(raw(a), _mm512_set1_ps(kE2M1Max));
  const U32 fixed = (U32)_mm512_add_round_ps(kept, _mm512_set1_ps(1.0f), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const U32 position = max_magnitude(fixed - (2u << 22), (U32)kept);
  const U32 byte = kShift > 14 ? random >> (kShift - 14) : random << (14 - kShift);
  return (position + ((byte & (0xFFu << 14)) | ((1u << 13) - (252u << 22)))) >> 22;
#else
  return e2m1_magnitude_stochastic(a, (random >> kShift) & 0xFFu);
#endif
}

/// An element's code without its sign, plus kCodeOffset. Its random byte is at kShift in the lanes of `random`.
template <bool kStochastic, bool kSaturate, int kShift>
JLP_RULE U32 code_bits(F32 y, U32 random) {
  if constexpr (kStochastic) return stochastic_code_bits<kShift>(absolute(y), random);
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

/// kPacket elements to kPacketBytes. `encode` is what each 16 are multiplied by, `random` holds as many bytes.
template <class E, bool kStochastic, bool kSaturate>
JLP_RULE void encode_row_packet(const typename E::Storage* x, const float* encode, const uint8_t* random, uint8_t* data) {
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
      code[k] =
          code_bits<kStochastic, kSaturate, 0>(even[k], bytes) + (code_bits<kStochastic, kSaturate, 8>(odd[k], bytes) << 4);
    }
    store_nibbles(code, even, odd, data + 4 * kLanes * half);
  }
}

/// Packets whose elements may exceed the largest code; 16 elements whose factor is NaN get codes 0.
template <class E, bool kStochastic>
__attribute__((noinline)) void encode_row_packet_saturating(const typename E::Storage* x, const float* encode,
                                                            const uint8_t* random, uint8_t* data) {
  encode_row_packet<E, kStochastic, true>(x, encode, random, data);
  for (int b = 0; b < kLanes; ++b)
    if (encode[b] != encode[b]) memset(data + 8 * b, 0, 8);
}

/// The codes of one packet, by its 16 random bytes per block.
template <class E, bool kStochastic>
JLP_RULE void quantize_row_packet(const typename E::Storage* x, const float* encode, bool ordinary, const uint8_t* random,
                                  uint8_t* data) {
  if (__builtin_expect(ordinary, 1))
    encode_row_packet<E, kStochastic, false>(x, encode, random, data);
  else
    encode_row_packet_saturating<E, kStochastic>(x, encode, random, data);
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
    code[k] = code_bits<kStochastic, true, 0>(low[k], random(0, k)) +
              (code_bits<kStochastic, true, 0>(high[k], random(1, k)) << 4);
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

// --- bf16 elements times powers of two, to nearest, in 16-bit lanes: multiplying is adding to the exponent

/// Whether codes are made so where all factors are powers of two.
template <class E, bool kStochastic>
constexpr bool kByExponent = std::is_same_v<E, BF16> && !kStochastic;

/// Calls visit with whether to make codes so.
template <class E, bool kStochastic, class Visit>
JLP_RULE void with_exponents(bool powers_of_two, Visit visit) {
  if constexpr (kByExponent<E, kStochastic>)
    if (powers_of_two) return visit(std::true_type{});
  visit(std::false_type{});
}

/// What to subtract from an element's bits to give the product the exponent of its code.
template <class Element>
JLP_RULE int16_t exponent_offset(float factor) {
  constexpr int kBias = 127 - Element::kBias;
  return static_cast<int16_t>(((kBias + 127) << 7) - static_cast<int>(Lanes<float>::bits(factor) >> 16));
}

/// Codes of 2 * kLanes elements, saturating. Those of 8-bit products below the least normal code are wrong:
/// `unknown` becomes negative. Of a zero, or subnormal, element the code is 0.
template <class Element>
JLP_RULE I16 codes_by_exponent(I16 x, I16 offset, I16& unknown) {
  constexpr bool kFloat8 = !Element::kPacked;
  constexpr int kShift = 7 - Element::kMantissaBits, kSignShift = kFloat8 ? 8 : 12;
  constexpr int16_t kMost = Element::kLargestCode << kShift, kBelowTie = (1 << (kShift - 1)) - 1;
  constexpr int16_t kLeastNormal = 1 << 7, kHalf = kLeastNormal / 2, kSign = 1 << (15 - kSignShift);
  const I16 magnitude = x & 0x7FFF, not_zero = magnitude > 0x7F;
  const I16 product = (I16)((U16)magnitude - (U16)offset);  // wraps where a factor is NaN: the caller discards these codes
  const I16 kept = min(product, I16{} + kMost);
  I16 code = (kept + kBelowTie + ((kept >> kShift) & 1)) >> kShift;
  if (kFloat8)
    unknown |= (I16)((U16)product - kLeastNormal) & not_zero;
  else  // 0.5 above a quarter of the least normal number, that number from three quarters of it on
    code = product < kLeastNormal ? -((product > static_cast<int16_t>(-kLeastNormal)) + (product >= kHalf)) : code;
  return (code | ((x >> kSignShift) & kSign)) & not_zero;
}

/// 4 * kLanes elements of a row by their offsets. Returns false and stores nothing if a product is below the least
/// normal code.
template <class Element>
JLP_RULE bool encode_float8_by_exponent(const uint16_t* x, I16 low_offset, I16 high_offset, uint8_t* data) {
  I16 unknown = I16{};
  const I16 low = codes_by_exponent<Element>(load<I16>(x), low_offset, unknown);
  const I16 high = codes_by_exponent<Element>(load<I16>(x + 2 * kLanes), high_offset, unknown);
  if (__builtin_expect(any_negative(unknown), 0)) return false;
  store(data, bytes_of(low, high));
  return true;
}

/// encode_row_pair, with the offsets of the columns.
JLP_RULE void encode_row_pair_by_exponent(const uint16_t* first, const uint16_t* second, const int16_t* offsets,
                                          uint8_t* data) {
  I16 pairs[2];
  JLP_UNROLL(2)
  for (int k = 0; k < 2; ++k) {
    const int at = 2 * kLanes * k;
    I16 unknown = I16{};
    const I16 offset = load<I16>(offsets + at);
    pairs[k] = codes_by_exponent<E2M1>(load<I16>(first + at), offset, unknown) |
               (codes_by_exponent<E2M1>(load<I16>(second + at), offset, unknown) << 4);
  }
  store(data, bytes_of(pairs[0], pairs[1]));
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
