// The 8-bit formats: floating-point elements (code_types.h), E8M0 scales.
#pragma once

#include "code_types.h"
#include "lanes.h"

namespace jaxlowprec {

constexpr uint32_t kFloat8NaN = 0x7Fu;  // of every type, and with its sign 0xFF
constexpr uint32_t kE8M0NaN = 0xFFu;

namespace detail {

/// The power of two whose last place is a's step: adding it rounds a, and leaves a's steps in the low bits. Its own exponent
/// counts the binades below, of which subnormal codes have none.
template <class Element, class F>
JLP_RULE Uint<F> float8_anchor(F a) {
  using L = Lanes<F>;
  constexpr uint32_t kSteps = static_cast<uint32_t>(23 - Element::kMantissaBits) << 23;
  return (L::bits(L::max(a, L::splat(Element::kMinNormal))) & kInfinityBits) + kSteps;
}

}  // namespace detail

/// The magnitude code nearest to 0 <= a <= Element::kMax, ties to the even code, plus kFloat8Offset.
template <class Element, class F>
JLP_RULE Uint<F> float8_magnitude_bits(F a) {
  using L = Lanes<F>;
  constexpr int kShift = 23 - Element::kMantissaBits;
  const Uint<F> anchor = detail::float8_anchor<Element>(a);
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
  return ((Lanes<F>::bits(x) >> 24) & 0x80u) | (magnitude(x) >= kInfinityBits ? fill<F>(kFloat8NaN) : finite);
}

}  // namespace detail

/// Bits of 0 <= a, nearest even, saturating. NaN is the caller's to handle.
template <class Element, class F>
JLP_RULE Uint<F> float8_encode_magnitude(F a) {
  return float8_magnitude_bits<Element>(Lanes<F>::min(a, Lanes<F>::splat(Element::kMax))) - kFloat8Offset<Element>;
}

/// The same, and what they decode to: adding the anchor rounds a, and taking it away leaves that.
template <class Element, class F>
JLP_RULE Uint<F> float8_encode_magnitude(F a, F& decoded) {
  using L = Lanes<F>;
  constexpr int kShift = 23 - Element::kMantissaBits;
  a = L::min(a, L::splat(Element::kMax));
  const Uint<F> anchor = detail::float8_anchor<Element>(a);
  const F rounded = a + L::from_bits(anchor);
  decoded = rounded - L::from_bits(anchor);
  return (L::bits(rounded) - anchor) + (anchor >> kShift) - kFloat8Offset<Element>;
}

/// Bits of x, nearest even, saturating; anything not finite becomes NaN, never a finite number.
template <class Element, class F>
JLP_RULE Uint<F> float8_encode(F x) {
  return detail::float8_signed(x, float8_encode_magnitude<Element>(absolute(x)));
}

/// The same, rounded stochastically by one random byte.
template <class Element, class F>
JLP_RULE Uint<F> float8_encode_stochastic(F x, Uint<F> byte) {
  return detail::float8_signed(x, float8_magnitude_stochastic<Element>(absolute(x), byte));
}

template <class Element, class F>
JLP_RULE F float8_decode(Uint<F> byte) {
  const Uint<F> m = byte & kFloat8NaN;
  Uint<F> value = detail::float8_value_bits<Element, F>(m);
  if constexpr (Element::kSpecial == Special::kInfinityAndNaN) {
    constexpr uint32_t kInfinity = Element::kInfinityCode;
    const Uint<F> special = m == kInfinity ? fill<F>(kInfinityBits) : fill<F>(kNaNBits);
    value = m >= kInfinity ? special : value;
  } else {
    value = m == kFloat8NaN ? fill<F>(kNaNBits) : value;
  }
  return Lanes<F>::from_bits(((byte & 0x80u) << 24) | value);
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
