// Quantisation to formats with one scale per line.
#include "../entry.h"
#include "quantize_lines.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class E, class Element, class Visit>
auto resolve_codes(const QuantizeProblem& p, Visit visit) {
  return with_bool(p.stochastic(), [&](auto stochastic) {
    return with_bool(LineScales(p.format).rule.divides,
                     [&](auto divides) { return visit(QuantizeLines<E, Element, stochastic, divides>{}); });
  });
}

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    if (p.format.code == CodeType::kInt8) return resolve_codes<E, Int8>(p, visit);
    return with_float8(p.format.code, [&](auto element) {
      using Element = decltype(element);
      return with_bool(p.stochastic(),
                       [&](auto stochastic) { return visit(QuantizeLines<E, Element, stochastic, true>{}); });
    });
  });
}

template <class Visit>
auto resolve_amaxes(const LineAmaxesProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(LineAmaxes<decltype(e)>{}); });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_lines, QuantizeProblem, resolve)
JLP_DEFINE_ENTRY(line_amaxes, LineAmaxesProblem, resolve_amaxes)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
