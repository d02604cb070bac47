// Activations and their derivatives: the same bits on every engine (numerics.md 12.1).
#pragma once

#include "lanes.h"

namespace jaxlowprec {

// --- tanh-GELU, x / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3), and its derivative: the same bits on every
// engine (numerics.md 9).

/// exp(z): 0 below -87, infinity above 88. Cody-Waite reduction, degree-6 polynomial, every operation rounded on its own.
template <class F>
JLP_RULE F exp_rule(F z) {
  using L = Lanes<F>;
  const F n = L::round_to_even(L::max(L::min(z, L::splat(100.0f)), L::splat(-100.0f)) * 1.44269502162933349609375f);
  const F r = (z - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = L::splat(1.38888893e-3f);
  p = p * r + 8.33333377e-3f;
  p = p * r + 4.16666679e-2f;
  p = p * r + 0.16666667f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const F value = p * L::from_bits((L::truncate(n) + 127u) << 23);
  const F large = z > 88.0f ? L::splat(__builtin_inff()) : value;
  return z < -87.0f ? L::splat(0.0f) : large;
}

template <class F>
JLP_RULE F gelu_tanh(F x) {
  const F cubic = (x * x) * 0.0356774069368839263916015625f;
  const F u = x * (cubic + 0.797884583473205566406250f);
  return x / (exp_rule(u * -2.0f) + 1.0f);
}

/// The value of an activation, and its derivative there.
template <class F>
struct ValueAndSlope {
  F value, slope;
};

/// x s, and the derivative of gelu_tanh: s + x s (1 - s) 2u' with s = 1 / (1 + e), e = exp(-2u), and so 1 - s = e s. In this
/// order:
///   c = clamp(x), square = c * c, u = c * (square * c1 + c0), e = exp_rule(u * -2), s = flush(1 / (e + 1)),
///   slope = square * c3 + c2, s + (c * s) * ((e * s) * slope)
/// with c0 = sqrt(2/pi), c1 = 0.044715 c0, c2 = 2 c0, c3 = 6 c1. At the clamp e is still finite and s already too small for
/// a normal number: the derivative is exactly 0 from there on to the left, and exactly 1 to the right.
template <class F>
JLP_RULE ValueAndSlope<F> gelu_tanh_with_slope(F x) {
  using L = Lanes<F>;
  const F c = L::max(L::splat(-10.015625f), L::min(L::splat(10.015625f), x));  // NaN, the second operand, stays
  const F square = c * c;
  const F u = c * (square * 0.0356774069368839263916015625f + 0.797884583473205566406250f);
  const F e = exp_rule(u * -2.0f);
  const F s = L::flush(1.0f / (e + 1.0f));
  const F slope = square * 0.2140644490718841552734375f + 1.59576916694641113281250f;
  return {x * s, s + (c * s) * ((e * s) * slope)};
}

template <class F>
JLP_RULE F gelu_tanh_gradient(F x) {
  return gelu_tanh_with_slope(x).slope;
}

enum class ActivationKind : int32_t { kGelu, kSilu, kReluSquared };

struct Gelu {
  template <class F>
  JLP_RULE F value(F x) {
    return Lanes<F>::flush(gelu_tanh(x));
  }
  template <class F>
  JLP_RULE ValueAndSlope<F> with_slope(F x) {
    const ValueAndSlope<F> found = gelu_tanh_with_slope(x);
    return {Lanes<F>::flush(found.value), Lanes<F>::flush(found.slope)};
  }
};

struct Silu {
  template <class F>
  JLP_RULE F value(F x) {
    return Lanes<F>::flush(x / (exp_rule(-x) + 1.0f));
  }
  /// t = x s and s + t (1 - s) with s = 1 / (1 + e), e = exp(-x), and so 1 - s = e s; x from -87 on.
  template <class F>
  JLP_RULE ValueAndSlope<F> with_slope(F x) {
    using L = Lanes<F>;
    x = L::max(L::splat(-87.0f), x);  // NaN, the second operand, stays
    const F e = exp_rule(-x);
    const F s = 1.0f / (e + 1.0f);
    const F t = L::flush(x * s);
    return {t, L::flush(s + L::flush(t * (e * s)))};
  }
};

struct ReluSquared {
  template <class F>
  JLP_RULE F value(F x) {
    const F positive = x > 0.0f ? x : zero_or_nan(x);
    return Lanes<F>::flush(positive * positive);
  }
  template <class F>
  JLP_RULE ValueAndSlope<F> with_slope(F x) {
    const F positive = x > 0.0f ? x : zero_or_nan(x);
    return {Lanes<F>::flush(positive * positive), positive * 2.0f};
  }

 private:
  template <class F>
  JLP_RULE F zero_or_nan(F x) {
    return x == x ? Lanes<F>::splat(0.0f) : x;
  }
};

/// Calls visit with the rule of a kind, on hosts and within kernels: visit runs where its caller runs.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <class Visit>
JLP_RULE auto with_rule(ActivationKind kind, Visit visit) {
  switch (kind) {
    case ActivationKind::kGelu: return visit(Gelu{});
    case ActivationKind::kSilu: return visit(Silu{});
    case ActivationKind::kReluSquared: break;
  }
  return visit(ReluSquared{});
}

}  // namespace jaxlowprec
