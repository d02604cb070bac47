// Quantisation to formats with one scale per block, or one per tensor.
#include "../entry.h"
#include "quantize_blocks.h"

namespace jaxlowprec {
namespace JLP_ISA {

template <class E>
const BlockEncoder<E>& block_encoder(CodeType code, bool stochastic) {
  return *with_float(code, [&](auto element) {
    using Element = decltype(element);
    return stochastic ? &kBlockEncoder<E, Element, true> : &kBlockEncoder<E, Element, false>;
  });
}
template const BlockEncoder<BF16>& block_encoder<BF16>(CodeType, bool);
template const BlockEncoder<F16>& block_encoder<F16>(CodeType, bool);
template const BlockEncoder<Float>& block_encoder<Float>(CodeType, bool);

namespace {

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    return visit(QuantizeBlocks<E>{block_encoder<E>(p.format.code, p.stochastic())});
  });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_blocks, QuantizeProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
