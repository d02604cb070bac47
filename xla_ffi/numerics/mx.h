// MX formats: a power of two (E8M0) a block of 32 (numerics.md 6).
#pragma once

#include "float8.h"
#include "lanes.h"

namespace jaxlowprec {

/// The properties of an element type that its block scales depend on.
struct MxElement {
  float inverse_maximum;
  uint32_t largest_exponent;  // of the largest element
  uint32_t half_unit;         // of an element's mantissa, in the bits of a float32
};
template <class Element>
constexpr MxElement kMxElement = {1.0f / Element::kMax, Element::kLargestExponent, 1u << (22 - Element::kMantissaBits)};

namespace detail {

/// The exponent of a non-zero finite block, which is at least 1 so that the scale is normal; 0 and NaN for the others.
template <class F>
JLP_RULE Uint<F> mx_scale_of(Uint<F> amax, Uint<F> exponent) {
  const Uint<F> finite = amax < kMinNormalBits ? fill<F>(0u) : exponent;
  return amax >= kInfinityBits ? fill<F>(kE8M0NaN) : finite;
}

}  // namespace detail

/// The least power of two that no element exceeds the largest code by, from the magnitude bits of a block's amax.
template <class F>
JLP_RULE Uint<F> mx_scale_up(Uint<F> amax, const MxElement& element) {
  using L = Lanes<F>;
  const Uint<F> up = e8m0_encode_up(L::flush(L::from_bits(amax) * element.inverse_maximum));
  return detail::mx_scale_of<F>(amax, up < 1u ? fill<F>(1u) : up);
}

/// amax's exponent less the largest element's, after adding `rounding` to amax's bits: nothing for the rule "floor", half a
/// unit of the element's mantissa for "even". Elements may exceed the largest code.
template <class F>
JLP_RULE Uint<F> mx_scale_floor(Uint<F> amax, const MxElement& element, uint32_t rounding) {
  const Uint<F> exponent = (amax + rounding) >> 23;
  return detail::mx_scale_of<F>(amax,
                                exponent > element.largest_exponent ? exponent - element.largest_exponent : fill<F>(1u));
}

/// What a block's elements are multiplied by: 2^(127 - scale), which is normal for every scale above; NaN for NaN.
template <class F>
JLP_RULE F mx_encode(Uint<F> scale) {
  const Uint<F> reciprocal = (254u - scale) << 23;
  return Lanes<F>::from_bits(scale == kE8M0NaN ? fill<F>(kNaNBits) : reciprocal);
}

}  // namespace jaxlowprec
