// What makes the operands of GEMMs: activations and norms; and sums over rows.
#include "../entry.h"
#include "activation.h"
#include "by_activation.h"
#include "norm.h"
#include "norm_gradient.h"
#include "sum_over_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <template <class> class Kernel>
struct ByElement {
  template <class Problem, class Visit>
  auto operator()(const Problem& p, Visit visit) const {
    return with_element(p.type, [&](auto element) { return visit(Kernel<decltype(element)>{}); });
  }
};

constexpr ByActivation<ActivationKernel> resolve_activation;
constexpr ByActivation<ActivationGradientKernel> resolve_activation_gradient;
constexpr ByElement<NormKernel> resolve_norm;
constexpr ByElement<NormGradientKernel> resolve_norm_gradient;
constexpr ByElement<SumOverRowsKernel> resolve_sum_over_rows;
constexpr auto resolve_add_parts = [](const AddPartsProblem&, auto visit) { return visit(AddPartsKernel{}); };

}  // namespace

JLP_DEFINE_ENTRY(activation, ActivationProblem, resolve_activation)
JLP_DEFINE_ENTRY(activation_gradient, ActivationGradientProblem, resolve_activation_gradient)
JLP_DEFINE_ENTRY(norm, NormProblem, resolve_norm)
JLP_DEFINE_ENTRY(norm_gradient, NormGradientProblem, resolve_norm_gradient)
JLP_DEFINE_ENTRY(sum_over_rows, SumOverRowsProblem, resolve_sum_over_rows)
JLP_DEFINE_ENTRY(add_parts, AddPartsProblem, resolve_add_parts)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
