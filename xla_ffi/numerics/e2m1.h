// E2M1, the 4-bit element of NVFP4 and MXFP4: magnitudes 0 .5 1 1.5 2 3 4 6 by code, bit 3 the sign (numerics.md 2).
#pragma once

#include "code_types.h"
#include "lanes.h"

namespace jaxlowprec {

constexpr float kE2M1Max = E2M1::kMax;

/// The magnitude code (0 to 7) nearest to 0 <= a < 7, ties to the even code, plus kE2M1MagicBits.
///
/// The code is a concave function of the value, the least of 2a, a + 2 and a/2 + 4; adding 1.5 * 2^23 rounds each to an
/// integer, and since rounding is monotone the least of the rounded is the rounded least.
template <class F>
JLP_RULE Uint<F> e2m1_magnitude_bits(F a) {
  using L = Lanes<F>;
  constexpr float kMagic = 12582912.0f;
  const F small = L::multiply_add_exact(a, L::splat(2.0f), L::splat(kMagic));
  const F middle = a + (kMagic + 2.0f);
  const F large = L::multiply_add_exact(a, L::splat(0.5f), L::splat(kMagic + 4.0f));
  return L::bits(L::min(L::min(small, middle), large));
}
constexpr uint32_t kE2M1MagicBits = 0x4B400000u;  // what e2m1_magnitude_bits adds to the code

/// The same for 0 <= a < 4.5, none of which has a code above that of 4.
template <class F>
JLP_RULE Uint<F> e2m1_magnitude_bits_to_four(F a) {
  using L = Lanes<F>;
  constexpr float kMagic = 12582912.0f;
  return L::bits(L::min(L::multiply_add_exact(a, L::splat(2.0f), L::splat(kMagic)), a + (kMagic + 2.0f)));
}

/// The saturating code with its sign. Zero must already be +0; a negative number that rounds to zero keeps its sign: code 8.
template <class F>
JLP_RULE Uint<F> e2m1_encode(F y) {
  const F a = Lanes<F>::min(absolute(y), Lanes<F>::splat(kE2M1Max));
  return (e2m1_magnitude_bits(a) - kE2M1MagicBits) | ((Lanes<F>::bits(y) >> 28) & 8u);
}

/// The magnitude code of a >= 0 rounded stochastically by one random byte (numerics.md 4), saturating: up if and only if
/// frac >= (255.5 - byte) / 256.
///
/// In float32's own bits the code is the exponent and first mantissa bit of a >= 1 and the 22 bits below are frac, so the
/// rule is a carry out of frac + (2 byte + 1) / 512 into the code. Below 1 the grid is even: there, fixed point is.
template <class F>
JLP_RULE Uint<F> e2m1_magnitude_stochastic(F a, Uint<F> byte) {
  using L = Lanes<F>;
  a = L::min(a, L::splat(kE2M1Max));
  const Uint<F> fixed = L::truncate(a * 8388608.0f);  // 2^23
  const Uint<F> position = a < 1.0f ? fixed : L::bits(a) - (252u << 22);
  return (position + ((byte << 14) | (1u << 13))) >> 22;
}

template <class F>
JLP_RULE Uint<F> e2m1_encode_stochastic(F y, Uint<F> byte) {
  return e2m1_magnitude_stochastic(absolute(y), byte) | ((Lanes<F>::bits(y) >> 28) & 8u);
}

template <class F>
JLP_RULE F e2m1_decode(Uint<F> code) {
  using L = Lanes<F>;
  const Uint<F> m = code & 7u;
  const Uint<F> normal = (m << 22) + (126u << 23);
  const Uint<F> magnitude = m < 2u ? m * 0x3F000000u : normal;  // 0 and 0.5
  return L::from_bits(magnitude | ((code & 8u) << 28));
}

}  // namespace jaxlowprec
