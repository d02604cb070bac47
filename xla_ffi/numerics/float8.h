// The 8-bit formats: E4M3 (float8_e4m3fn) and E5M2 elements, E8M0 scales.
#pragma once

#include "lanes.h"

namespace jaxlowprec {

struct E4M3 {
  static constexpr int kMantissaBits = 3, kBias = 7, kLargestExponent = 8, kLargestCode = 0x7E;
  static constexpr float kMax = 448.0f, kMinNormal = 0.015625f;  // 2^-6
};
struct E5M2 {
  static constexpr int kMantissaBits = 2, kBias = 15, kLargestExponent = 15, kLargestCode = 0x7B;
  static constexpr float kMax = 57344.0f, kMinNormal = 6.103515625e-05f;  // 2^-14
};

constexpr uint32_t kE4M3NaN = 0x7Fu;
constexpr uint32_t kE5M2NaN = 0x7Fu;
constexpr uint32_t kE8M0NaN = 0xFFu;

/// The magnitude code nearest to 0 <= a <= Element::kMax, ties to the even code, plus kFloat8Offset.
///
/// The anchor is the power of two whose last place is a's step: adding it rounds a, and leaves a's steps in the low bits.
/// Its own exponent counts the binades below, of which subnormal codes have none.
template <class Element, class F>
JLP_RULE Uint<F> float8_magnitude_bits(F a) {
  using L = Lanes<F>;
  constexpr int kShift = 23 - Element::kMantissaBits;
  const Uint<F> anchor =
      (L::bits(L::max(a, L::splat(Element::kMinNormal))) & kInfinityBits) + (static_cast<uint32_t>(kShift) << 23);
  return (L::bits(a + L::from_bits(anchor)) - anchor) + (anchor >> kShift);
}
template <class Element>
constexpr uint32_t kFloat8Offset =
    static_cast<uint32_t>(127 + 23 - Element::kMantissaBits + 1 - Element::kBias) << Element::kMantissaBits;

/// The saturating magnitude code of a >= 0 rounded stochastically by one random byte (numerics.md 4): up if and only if
/// frac >= (255.5 - byte) / 256.
///
/// As e2m1_magnitude_stochastic: a carry into the code out of float32's own bits, or of fixed point where the grid is even.
template <class Element, class F>
JLP_RULE Uint<F> float8_magnitude_stochastic(F a, Uint<F> byte) {
  using L = Lanes<F>;
  constexpr int kShift = 23 - Element::kMantissaBits;
  constexpr uint32_t kFixedBits = static_cast<uint32_t>(127 + 22 + Element::kBias) << 23;  // 2^kShift smallest steps
  a = L::min(a, L::splat(Element::kMax));
  const Uint<F> fixed = L::truncate(L::min(a, L::splat(Element::kMinNormal)) * Lanes<float>::from_bits(kFixedBits));
  const Uint<F> position =
      a < Element::kMinNormal ? fixed : L::bits(a) - (static_cast<uint32_t>(127 - Element::kBias) << 23);
  return (position + ((byte << (kShift - 8)) | (1u << (kShift - 9)))) >> kShift;
}

namespace detail {

// The float32 of finite magnitude bits m; subnormals are m times the smallest step, since f32 subnormals would be flushed.
template <class Element, class F>
JLP_RULE Uint<F> float8_value_bits(Uint<F> m) {
  using L = Lanes<F>;
  constexpr uint32_t kStepBits = static_cast<uint32_t>(127 + 1 - Element::kBias - Element::kMantissaBits) << 23;
  const Uint<F> normal = (m << (23 - Element::kMantissaBits)) + (static_cast<uint32_t>(127 - Element::kBias) << 23);
  const Uint<F> subnormal = L::bits(L::to_float(m) * Lanes<float>::from_bits(kStepBits));
  return m < (1u << Element::kMantissaBits) ? subnormal : normal;
}

/// The sign bit of x, and a magnitude code unless x is not finite: that is NaN, never a number.
template <class F>
JLP_RULE Uint<F> float8_signed(F x, Uint<F> finite) {
  return ((Lanes<F>::bits(x) >> 24) & 0x80u) | (magnitude(x) >= kInfinityBits ? fill<F>(0x7Fu) : finite);
}

}  // namespace detail

/// E4M3 bits of 0 <= a, nearest even, saturating at 448. NaN is the caller's to handle.
template <class F>
JLP_RULE Uint<F> e4m3_encode_magnitude(F a) {
  return float8_magnitude_bits<E4M3>(Lanes<F>::min(a, Lanes<F>::splat(E4M3::kMax))) - kFloat8Offset<E4M3>;
}

/// E4M3 bits of x, nearest even, saturating; anything not finite becomes NaN, never a finite number.
template <class F>
JLP_RULE Uint<F> e4m3_encode(F x) {
  return detail::float8_signed(x, e4m3_encode_magnitude(absolute(x)));
}

/// The same, rounded stochastically by one random byte.
template <class F>
JLP_RULE Uint<F> e4m3_encode_stochastic(F x, Uint<F> byte) {
  return detail::float8_signed(x, float8_magnitude_stochastic<E4M3>(absolute(x), byte));
}

template <class F>
JLP_RULE F e4m3_decode(Uint<F> byte) {
  const Uint<F> m = byte & 0x7Fu;
  const Uint<F> value = detail::float8_value_bits<E4M3, F>(m);
  return Lanes<F>::from_bits(((byte & 0x80u) << 24) | (m == kE4M3NaN ? fill<F>(kNaNBits) : value));
}

/// E5M2 bits of x, nearest even, saturating at 57344; anything not finite becomes NaN.
template <class F>
JLP_RULE Uint<F> e5m2_encode(F x) {
  const F a = Lanes<F>::min(absolute(x), Lanes<F>::splat(E5M2::kMax));
  return detail::float8_signed(x, float8_magnitude_bits<E5M2>(a) - kFloat8Offset<E5M2>);
}

/// The same, rounded stochastically by one random byte.
template <class F>
JLP_RULE Uint<F> e5m2_encode_stochastic(F x, Uint<F> byte) {
  return detail::float8_signed(x, float8_magnitude_stochastic<E5M2>(absolute(x), byte));
}

template <class F>
JLP_RULE F e5m2_decode(Uint<F> byte) {
  const Uint<F> m = byte & 0x7Fu;
  const Uint<F> value = detail::float8_value_bits<E5M2, F>(m);
  const Uint<F> special = m == 0x7Cu ? fill<F>(kInfinityBits) : fill<F>(kNaNBits);
  return Lanes<F>::from_bits(((byte & 0x80u) << 24) | (m >= 0x7Cu ? special : value));
}

/// E8M0 bits of the least power of two >= a (numerics.md 6): 0 for zero, at least 1 otherwise, NaN for what is not finite.
template <class F>
JLP_RULE Uint<F> e8m0_encode_up(F a) {
  const Uint<F> u = magnitude(a);
  const Uint<F> up = (u + 0x007FFFFFu) >> 23;
  const Uint<F> finite = u < kMinNormalBits ? fill<F>(0u) : up;
  return u >= kInfinityBits ? fill<F>(kE8M0NaN) : finite;
}

/// 2^(byte - 127). Byte 0 belongs to zero blocks; its 2^-127 is subnormal and counts as zero.
template <class F>
JLP_RULE F e8m0_decode(Uint<F> byte) {
  const Uint<F> value = byte << 23;
  return Lanes<F>::from_bits(byte == kE8M0NaN ? fill<F>(kNaNBits) : value);
}

}  // namespace jaxlowprec
