// Norms that are quantised and not stored.
#include "../entry.h"
#include "norm_quantize.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve(const NormQuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_bool(p.kind == NormKind::kLayer,
                     [&](auto layer) { return visit(NormQuantize<decltype(e), decltype(layer)::value>{}); });
  });
}

}  // namespace

JLP_DEFINE_ENTRY(norm_quantize, NormQuantizeProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
