// Quantisation to formats with a scale a block, or one for the tensor.
#include "entry.h"
#include "quantize_blocks.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    return with_bool(p.rowwise.random.key || p.columnwise.random.key, [&](auto stochastic) {
      constexpr bool kStochastic = decltype(stochastic)::value;
      switch (p.format.code) {
        case CodeType::kE2M1: return visit(QuantizeBlocks<E, E2M1, kStochastic>{});
        case CodeType::kE4M3: return visit(QuantizeBlocks<E, E4M3, kStochastic>{});
        default: return visit(QuantizeBlocks<E, E5M2, kStochastic>{});
      }
    });
  });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_blocks, QuantizeProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
