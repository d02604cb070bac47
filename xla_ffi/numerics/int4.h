// Int4: 4-bit integers with a 16-bit scale per group, decoded to the bits that a served model multiplies with
// (int4_qat.md 1.2 and 1.4). Elements are numbers of the deployment dtype, held as float32.
//
// Rounding x / s needs no division an element: t = x * (1/s) + 192 is a multiple of 2^-16. An exact half k + 1/2 is one and
// is restored from the product's error of 2^-20 at most, or 2^-19 where 1/s is off by a unit in its last place; any other
// quotient of two 11-bit numbers below 16 is 2^-13 or more away from a half. So t rounds as the exact quotient does, ties to
// even, whether the product was rounded on its own or fused.
#pragma once

#include "float16.h"
#include "lanes.h"

namespace jaxlowprec {

constexpr float kInt4LeastScale = 1e-5f;
constexpr uint32_t kInt4Middle = 8;           // the code of zero of symmetric groups
constexpr float kInt4Largest = 15.0f;         // of the codes
constexpr float kInt4Integers = 12582912.0f;  // from here on to 2^24 float32 numbers are integers: its low bits are theirs
constexpr uint32_t kInt4IntegersBits = 0x4B400000u;

/// The deployment dtypes. `finite_bits` and `decode` are of numbers that are not NaN.
struct Int4BF16 {
  template <class F>
  JLP_RULE Uint<F> finite_bits(F x) {
    const Uint<F> u = Lanes<F>::bits(x);
    return (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  }
  template <class F>
  JLP_RULE F decode(Uint<F> half) {
    return bf16_decode<F>(half);
  }
  static constexpr uint32_t kNaN = 0x7FC0u;
};
struct Int4F16 {
  template <class F>
  JLP_RULE Uint<F> finite_bits(F x) {
    return f16_encode(x);
  }
  template <class F>
  JLP_RULE F decode(Uint<F> half) {
    return f16_decode<F>(half);
  }
  static constexpr uint32_t kNaN = 0x7E00u;
};

/// What the elements of a group are quantised and decoded by.
template <class F>
struct Int4Group {
  F scale;       // NaN: the group holds NaN or infinity, or its range is none of float32
  F inverse;     // of the scale
  Uint<F> zero;  // the code of zero
  F most;        // kInt4Integers plus the largest number of steps from zero: asymmetric groups alone can round beyond it
};

template <class F, class Deploy>
JLP_RULE Int4Group<F> int4_group(F step, Uint<F> largest_magnitude) {
  using L = Lanes<F>;
  const F scale = Deploy::template decode<F>(Deploy::template finite_bits<F>(L::max(step, L::splat(kInt4LeastScale))));
  const F bad = L::from_bits(fill<F>(kNaNBits));
  const F known = largest_magnitude >= kInfinityBits ? bad : scale;
  const F finite = magnitude(known) >= kInfinityBits ? bad : known;
  return {finite, 1.0f / finite, fill<F>(kInt4Middle), L::splat(kInt4Integers + 7.0f)};
}

/// x / scale rounded to an integer, ties to even, plus kInt4Integers and an even number.
template <class F>
JLP_RULE F int4_nearest(F x, F inverse, int plus = 0) {
  using L = Lanes<F>;
  return L::multiply_add_exact(x, inverse, L::splat(192.0f)) + (kInt4Integers - 192.0f + static_cast<float>(plus));
}

/// From the magnitude bits of the largest magnitude. Multiplying by 1/7 gives the same 16-bit scales as dividing by 7.
template <class F, class Deploy>
JLP_RULE Int4Group<F> int4_symmetric(Uint<F> amax) {
  return int4_group<F, Deploy>(Lanes<F>::from_bits(amax) * (1.0f / 7.0f), amax);
}

/// From the magnitude bits of the largest positive and the largest negative number; 0 where there is none.
template <class F, class Deploy>
JLP_RULE Int4Group<F> int4_asymmetric(Uint<F> positive, Uint<F> negative) {
  using L = Lanes<F>;
  const F low = L::from_bits(negative);
  const Uint<F> largest = positive > negative ? positive : negative;
  Int4Group<F> group = int4_group<F, Deploy>((L::from_bits(positive) + low) / kInt4Largest, largest);
  const F zero = L::min(int4_nearest(low, group.inverse), L::splat(kInt4Integers + kInt4Largest)) - kInt4Integers;
  const F known = group.scale != group.scale ? L::splat(0.0f) : zero;
  group.zero = L::truncate(known);
  group.most = (kInt4Integers + kInt4Largest) - known;
  return group;
}

/// Steps from zero plus kInt4Integers: a symmetric group's never exceed 7.
template <class F, bool kSymmetric>
JLP_RULE F int4_steps(F x, const Int4Group<F>& group) {
  const F steps = int4_nearest(x, group.inverse);
  return kSymmetric ? steps : Lanes<F>::min(steps, group.most);
}

/// x as a code in the low 4 bits; those above are not zero.
template <class F, bool kSymmetric>
JLP_RULE Uint<F> int4_encode(F x, const Int4Group<F>& group) {
  using L = Lanes<F>;
  if (kSymmetric) return L::bits(int4_nearest(x, group.inverse, kInt4Middle));
  return L::bits(int4_steps<F, false>(x, group)) + group.zero;
}

/// The scale as stored.
template <class F, class Deploy>
JLP_RULE Uint<F> int4_scale_bits(F scale) {
  const Uint<F> bits = Deploy::template finite_bits<F>(scale);  // of a number of that dtype: exact
  return scale != scale ? fill<F>(Deploy::kNaN) : bits;
}

/// A stored scale, as codes are multiplied by it: one that is not finite decodes to NaN.
template <class F, class Deploy>
JLP_RULE F int4_decode_scale(Uint<F> bits) {
  using L = Lanes<F>;
  const F scale = L::flush(Deploy::template decode<F>(bits));
  return magnitude(scale) >= kInfinityBits ? L::from_bits(fill<F>(kNaNBits)) : scale;
}

/// The deployment dtype's bits of so many steps from zero.
template <class F, class Deploy>
JLP_RULE Uint<F> int4_decode(F steps, F scale) {
  const Uint<F> bits = Deploy::template finite_bits<F>(steps * scale);
  return scale != scale ? fill<F>(Deploy::kNaN) : bits;
}

}  // namespace jaxlowprec
