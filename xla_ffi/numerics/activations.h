// Activations and their derivatives: the same bits on every engine (numerics.md 12.1).
#pragma once

#include "gelu.h"

namespace jaxlowprec {

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

/// Calls visit with the rule of a kind.
template <class Visit>
auto with_rule(ActivationKind kind, Visit visit) {
  switch (kind) {
    case ActivationKind::kGelu: return visit(Gelu{});
    case ActivationKind::kSilu: return visit(Silu{});
    default: return visit(ReluSquared{});
  }
}

}  // namespace jaxlowprec
