// The float32 scale of 8-bit floats, a block or a tensor (numerics.md 5 and 7).
#pragma once

#include "float8.h"
#include "lanes.h"

namespace jaxlowprec {

struct Float8ScaleRule {
  float maximum;       // the largest element
  float amax_epsilon;  // the least amax to scale by
  bool power_of_two;   // rounded down, so that nothing saturates
};

/// What elements are multiplied by, from the magnitude bits of their amax; NaN where that is not finite. At most 2^126, so
/// that its inverse is normal.
template <class F>
JLP_RULE F float8_encode_scale(Uint<F> amax, const Float8ScaleRule& rule) {
  using L = Lanes<F>;
  const F a = L::max(L::flush(L::from_bits(amax)), L::splat(Lanes<float>::flush(rule.amax_epsilon)));
  const F exact = L::min(rule.maximum / a, L::splat(8.5070591730234616e37f));
  const F down = L::from_bits(L::bits(exact) & (rule.power_of_two ? 0xFF800000u : 0xFFFFFFFFu));
  const F scale = a == 0.0f ? L::splat(1.0f) : down;
  return amax >= kInfinityBits ? L::from_bits(fill<F>(kNaNBits)) : scale;
}

/// The stored scale.
template <class F>
JLP_RULE F float8_decode_scale(F encode) {
  using L = Lanes<F>;
  const F inverse = L::flush(1.0f / encode);
  return encode != encode ? L::from_bits(fill<F>(kNaNBits)) : inverse;
}

/// The encode scale of a tensor from its amax, or as given; NaN where that is not finite, for a negative amax, and for a
/// given scale that nothing could be decoded with.
JLP_RULE float float8_tensor_encode_scale(float amax_or_scale, bool is_scale, const Float8ScaleRule& rule) {
  using L = Lanes<float>;
  const float scale = L::flush(amax_or_scale);
  if (!is_scale) return scale < 0.0f ? L::from_bits(kNaNBits) : float8_encode_scale<float>(magnitude(scale), rule);
  return scale > 0.0f && magnitude(scale) < kInfinityBits ? scale : L::from_bits(kNaNBits);
}

}  // namespace jaxlowprec
