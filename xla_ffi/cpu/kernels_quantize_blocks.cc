// Quantisation to formats with one scale per block, or one per tensor.
#include "entry.h"
#include "quantize_blocks.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class E, bool kStochastic>
const BlockEncoder<E>& encoder_of(CodeType code) {
  switch (code) {
    case CodeType::kE2M1: return kBlockEncoder<E, E2M1, kStochastic>;
    case CodeType::kE4M3: return kBlockEncoder<E, E4M3, kStochastic>;
    default: return kBlockEncoder<E, E5M2, kStochastic>;
  }
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
