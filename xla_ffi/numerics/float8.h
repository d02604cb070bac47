// The 8-bit formats: E4M3 (float8_e4m3fn) and E5M2 elements, E8M0 scales.
#pragma once

#include "lanes.h"

namespace jaxlowprec {

constexpr float kE4M3Max = 448.0f;
constexpr float kE5M2Max = 57344.0f;
constexpr uint32_t kE4M3NaN = 0x7Fu;
constexpr uint32_t kE5M2NaN = 0x7Fu;
constexpr uint32_t kE8M0NaN = 0xFFu;

namespace detail {

// Nearest-even magnitude bits of a finite a <= the format's maximum, for a format with MantissaBits and exponent bias Bias.
// Subnormals: the sum with 2^(24 - Bias - MantissaBits) has the format's smallest step as its last place.
template <int MantissaBits, int Bias, class F>
JLP_RULE Uint<F> float8_magnitude(F a) {
  using L = Lanes<F>;
  constexpr int kShift = 23 - MantissaBits;
  constexpr uint32_t kAnchorBits = static_cast<uint32_t>(127 + 24 - Bias - MantissaBits) << 23;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - Bias) << 23;
  const Uint<F> u = L::bits(a);
  const Uint<F> normal = ((u + ((1u << (kShift - 1)) - 1u) + ((u >> kShift) & 1u)) >> kShift) -
                         (static_cast<uint32_t>(127 - Bias) << MantissaBits);
  const Uint<F> subnormal = L::bits(a + Lanes<float>::from_bits(kAnchorBits)) - kAnchorBits;
  return u < kMinNormal ? subnormal : normal;
}

// The float32 of finite magnitude bits m; subnormals are m times the smallest step, since f32 subnormals would be flushed.
template <int MantissaBits, int Bias, class F>
JLP_RULE Uint<F> float8_value_bits(Uint<F> m) {
  using L = Lanes<F>;
  constexpr uint32_t kStepBits = static_cast<uint32_t>(127 + 1 - Bias - MantissaBits) << 23;
  const Uint<F> normal = (m << (23 - MantissaBits)) + (static_cast<uint32_t>(127 - Bias) << 23);
  const Uint<F> subnormal = L::bits(L::to_float(m) * Lanes<float>::from_bits(kStepBits));
  return m < (1u << MantissaBits) ? subnormal : normal;
}

}  // namespace detail

/// E4M3 bits of 0 <= a, nearest even, saturating at 448. NaN is the caller's to handle.
template <class F>
JLP_RULE Uint<F> e4m3_encode_magnitude(F a) {
  return detail::float8_magnitude<3, 7>(Lanes<F>::min(a, Lanes<F>::splat(kE4M3Max)));
}

/// E4M3 bits of x, nearest even, saturating; anything not finite becomes NaN, never a finite number.
template <class F>
JLP_RULE Uint<F> e4m3_encode(F x) {
  const Uint<F> finite = e4m3_encode_magnitude(absolute(x));
  return ((Lanes<F>::bits(x) >> 24) & 0x80u) | (magnitude(x) >= kInfinityBits ? fill<F>(kE4M3NaN) : finite);
}

template <class F>
JLP_RULE F e4m3_decode(Uint<F> byte) {
  const Uint<F> m = byte & 0x7Fu;
  const Uint<F> value = detail::float8_value_bits<3, 7, F>(m);
  return Lanes<F>::from_bits(((byte & 0x80u) << 24) | (m == kE4M3NaN ? fill<F>(kNaNBits) : value));
}

/// E5M2 bits of x, nearest even, saturating at 57344; anything not finite becomes NaN.
template <class F>
JLP_RULE Uint<F> e5m2_encode(F x) {
  using L = Lanes<F>;
  const Uint<F> finite = detail::float8_magnitude<2, 15>(L::min(absolute(x), L::splat(kE5M2Max)));
  return ((L::bits(x) >> 24) & 0x80u) | (magnitude(x) >= kInfinityBits ? fill<F>(kE5M2NaN) : finite);
}

template <class F>
JLP_RULE F e5m2_decode(Uint<F> byte) {
  const Uint<F> m = byte & 0x7Fu;
  const Uint<F> value = detail::float8_value_bits<2, 15, F>(m);
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
