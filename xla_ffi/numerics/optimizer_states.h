// Optimizer states in 8 bits, master weights, AdamW and Lion (numerics.md 19).
//
// The step's arithmetic needs a mode in which subnormal numbers count as zero: -ftz on the device, and
// cpu/flush_denormals.h on hosts. All else is integer operations on the bits of float32.
#pragma once

#include "float16.h"
#include "lanes.h"

namespace jaxlowprec {

// --- draws: 16 random bits for each element

constexpr int kDrawsOfCall = 8;        // half-words that a call of Philox gives, for an eighth of a row
constexpr uint32_t kDrawnHalves = 13;  // the third word of its counter (eighth, row, kDrawnHalves, 0)

// --- stored numbers

/// The bits of x as they are stored: every NaN is the same one.
template <class F>
JLP_RULE Uint<F> stored_bits(F x) {
  return magnitude(x) > kInfinityBits ? fill<F>(kNaNBits) : Lanes<F>::bits(x);
}

// --- states

constexpr int kStateBlock = 32;         // elements of a row that share an exponent
constexpr uint32_t kStatePoison = 255;  // the exponent of a block that decodes to NaN
constexpr int kStateDropped = 20;       // bits of float32 below the three of the mantissa that are kept
constexpr uint32_t kStateInfinity = kInfinityBits >> kStateDropped;
constexpr uint32_t kStateToNearest = 1u << (kStateDropped - 1);

/// The code that stands for the upper bits 8 e + 7, the largest of a block of exponent e.
template <bool kSigned>
constexpr uint32_t kStateTop = kSigned ? 127 : 255;

/// d of stochastic rounding, of a draw.
template <class F>
JLP_RULE Uint<F> state_rounding(Uint<F> draw) {
  return (draw << (kStateDropped - 16)) + (1u << (kStateDropped - 17));
}

/// r: the upper bits that |x| is rounded to; 0 for zero. `d` is kStateToNearest or state_rounding's.
///
/// kOrdinary: x is known to be a normal number of less than 2^127, and above 0 if there is no sign.
template <bool kSigned, bool kOrdinary = false, class F>
JLP_RULE Uint<F> state_rank(F x, Uint<F> d) {
  const Uint<F> b = magnitude(x), rounded = (b + d) >> kStateDropped;
  if (kOrdinary) return rounded;
  const Uint<F> largest = fill<F>(kStateInfinity - 1), infinity = fill<F>(kStateInfinity);
  const Uint<F> finite = rounded < largest ? rounded : largest;
  Uint<F> rank = b < kInfinityBits ? finite : infinity;
  if (!kSigned) rank = (Lanes<F>::bits(x) & kSignBit) != 0u ? infinity : rank;
  return b < kMinNormalBits ? fill<F>(0) : rank;
}

/// The exponent of a block from its largest rank.
template <class F>
JLP_RULE Uint<F> state_exponent(Uint<F> largest_rank) {
  return largest_rank >> 3;
}

template <bool kSigned, bool kOrdinary = false, class F>
JLP_RULE Uint<F> state_code(F x, Uint<F> rank, Uint<F> exponent) {
  const Uint<F> first = (exponent << 3) + 7u, least = first + (kSigned ? 0u : 1u);
  const Uint<F> lifted = rank + kStateTop<kSigned>;
  const Uint<F> magnitude = (lifted > least ? lifted : least) - first;
  const Uint<F> code = kOrdinary ? magnitude : rank == 0u ? fill<F>(0) : magnitude;
  if (!kSigned) return code;
  const Uint<F> sign = ((kOrdinary ? Lanes<F>::bits(x) : stored_bits(x)) & kSignBit) >> 24;
  return code | (code != 0u ? sign : fill<F>(0));
}

template <bool kSigned, class F>
JLP_RULE F state_decode(Uint<F> code, uint32_t exponent) {
  const Uint<F> magnitude = kSigned ? code & 127u : code;
  const Uint<F> lifted = magnitude + (8 * exponent + 7), least = fill<F>(kStateTop<kSigned> + 8);  // 8: those of 2^-126
  const Uint<F> upper = (lifted > least ? lifted : least) - kStateTop<kSigned>;
  Uint<F> bits = magnitude == 0u ? fill<F>(0) : upper << kStateDropped;
  if (kSigned) bits = bits | ((code >> 7) << 31);
  return Lanes<F>::from_bits(exponent == kStatePoison ? fill<F>(kNaNBits) : bits);
}

// --- weights

/// A weight taken apart: the bits of a bfloat16, and the low 8 or 16 bits of a remainder.
template <class F>
struct MasterParts {
  Uint<F> parameter, rest;
};

/// `rest`: its low 16 bits, or with 24 bits its 8; those above are not read.
template <int kBits, class F>
JLP_RULE F master_join(Uint<F> parameter, Uint<F> rest) {
  static_assert(kBits == 32 || kBits == 24, "others have no remainder");
  const Uint<F> low = (kBits == 24 ? rest << 8 : rest) & 0xFFFFu;
  return Lanes<F>::from_bits((parameter << 16) + ((low ^ 0x8000u) - 0x8000u));
}

template <int kBits, class F>
JLP_RULE MasterParts<F> master_split(F weight) {
  static_assert(kBits == 32 || kBits == 24, "others have no remainder");
  Uint<F> b = stored_bits(weight);
  if (kBits == 24) b = magnitude(weight) < kInfinityBits ? (b + 0x80u) & 0xFFFFFF00u : b;
  const Uint<F> upper = (b + 0x8000u) >> 16, rest = b - (upper << 16);
  return {upper, (kBits == 24 ? rest >> 8 : rest) & (kBits == 24 ? 0xFFu : 0xFFFFu)};
}

/// The bfloat16 of a weight that is rounded by its draw.
template <class F>
JLP_RULE Uint<F> master_drawn(F weight, Uint<F> draw) {
  const Uint<F> b = stored_bits(weight);
  return (magnitude(weight) < kInfinityBits ? b + draw : b) >> 16;
}

/// The nearest bfloat16 of a weight, ties to even.
template <class F>
JLP_RULE Uint<F> master_nearest(F weight) {
  return bf16_encode(Lanes<F>::from_bits(stored_bits(weight)));
}

// --- AdamW and Lion: each rule has its scalars, and what it makes of a gradient and old moments

template <class F>
struct UpdateStep {
  F m, v, update;  // NaN may be any of its kind; Lion has no v
};

/// 1 or -1; zero and NaN as they are.
template <class F>
JLP_RULE F sign_or_zero(F x) {
  const Uint<F> b = Lanes<F>::bits(x), one = (b & kSignBit) | 0x3F800000u;
  return Lanes<F>::from_bits(magnitude(x) - 1u < kInfinityBits ? one : b);
}

struct AdamW {
  struct Scalars {
    float b1, c1, b2, c2, k1, k2, epsilon, weight_decay, minus_rate;
  };
  static constexpr bool kHasNu = true;

  /// The new moments.
  template <class F>
  JLP_RULE UpdateStep<F> moments(F g, F m, F v, const Scalars& s) {
    return {g * s.c1 + m * s.b1, (g * g) * s.c2 + v * s.b2, F{}};
  }
  template <class F>
  JLP_RULE F direction(const UpdateStep<F>& step, const Scalars& s) {
    return direction_of_quotients(step.m / s.k1, step.v / s.k2, s);
  }
  template <class F>
  JLP_RULE F direction_of_quotients(F m_over_k1, F v_over_k2, const Scalars& s) {
    return m_over_k1 / (Lanes<F>::root(v_over_k2) + s.epsilon);
  }
};

struct Lion {
  struct Scalars {
    float b1, c1, b2, c2, weight_decay, minus_rate;
  };
  static constexpr bool kHasNu = false;

  /// The new moment, and the direction in the place of v.
  template <class F>
  JLP_RULE UpdateStep<F> moments(F g, F m, F, const Scalars& s) {
    return {g * s.c2 + m * s.b2, sign_or_zero(g * s.c1 + m * s.b1), F{}};
  }
  template <class F>
  JLP_RULE F direction(const UpdateStep<F>& step, const Scalars&) {
    return step.v;
  }
};

template <class Rule>
constexpr int kUpdateScalars = sizeof(typename Rule::Scalars) / sizeof(float);

/// The update of a weight in a direction.
template <class F, class Scalars>
JLP_RULE F update_along(F direction, F weight, const Scalars& s) {
  return (direction + weight * s.weight_decay) * s.minus_rate;
}

template <class Rule, class F>
JLP_RULE UpdateStep<F> update_step(F g, F m, F v, F weight, const typename Rule::Scalars& s) {
  UpdateStep<F> step = Rule::moments(g, m, v, s);
  step.update = update_along(Rule::direction(step, s), weight, s);
  return step;
}

}  // namespace jaxlowprec
