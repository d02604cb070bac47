// Quantisation to formats with one scale per block, or one per tensor.
#include "../entry.h"
#include "quantize_blocks.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class E, bool kStochastic>
const BlockEncoder<E>& encoder_of(CodeType code) {
  return *with_float(code, [](auto element) { return &kBlockEncoder<E, decltype(element), kStochastic>; });
}

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    const bool stochastic = p.rowwise.random.key || p.columnwise.random.key;
    return visit(QuantizeBlocks<E>{stochastic ? encoder_of<E, true>(p.format.code) : encoder_of<E, false>(p.format.code)});
  });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_blocks, QuantizeProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
