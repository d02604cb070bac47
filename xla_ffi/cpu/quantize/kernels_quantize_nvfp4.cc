// Quantisation to NVFP4.
#include "../entry.h"
#include "quantize_nvfp4.h"
#include "row_scaled_quantize.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(QuantizeNvfp4<decltype(e)>{p.stochastic(), p.eden}); });
}

template <class Visit>
auto resolve_row_scaled(const RowScaledQuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(RowScaledQuantize<decltype(e)>{}); });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_nvfp4, QuantizeProblem, resolve)
JLP_DEFINE_ENTRY(row_scaled_quantize, RowScaledQuantizeProblem, resolve_row_scaled)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
