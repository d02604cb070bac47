// The compile-time cases of activations: the type of elements, the rule, and whether there is a second operand.
#pragma once

#include "../entry.h"

namespace jaxlowprec {
namespace JLP_ISA {

template <template <class, class, bool> class Kernel>
struct ByActivation {
  template <class Problem, class Visit>
  auto operator()(const Problem& p, Visit visit) const {
    return with_element(p.type, [&](auto element) {
      return with_rule(p.kind, [&](auto rule) {
        return with_bool(p.up != nullptr, [&](auto gated) {
          return visit(Kernel<decltype(element), decltype(rule), decltype(gated)::value>{});
        });
      });
    });
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
