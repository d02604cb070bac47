// Amaxes, Hadamard transforms, and codes back to numbers.
#include "../entry.h"
#include "amax.h"
#include "dequantize.h"
#include "rotate.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve_amax(const AmaxProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(Amax<decltype(e)>{}); });
}

template <class Visit>
auto resolve_dequantize(const DequantizeProblem&, Visit visit) {
  return visit(Dequantize{});
}

template <class Visit>
auto resolve_hadamard(const HadamardProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    switch (p.size) {
      case 16: return visit(Hadamard<E, 16>{});
      case 32: return visit(Hadamard<E, 32>{});
      case 64: return visit(Hadamard<E, 64>{});
      case 128: return visit(Hadamard<E, 128>{});
      default: return visit(Hadamard<E, 256>{});
    }
  });
}

}  // namespace

JLP_DEFINE_ENTRY(amax, AmaxProblem, resolve_amax)
JLP_DEFINE_ENTRY(dequantize, DequantizeProblem, resolve_dequantize)
JLP_DEFINE_ENTRY(hadamard, HadamardProblem, resolve_hadamard)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
