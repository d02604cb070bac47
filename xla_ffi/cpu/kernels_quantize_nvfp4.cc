// Quantisation to NVFP4.
#include "entry.h"
#include "quantize_nvfp4.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_bool(p.format.tiles, [&](auto tiles) {
      return with_bool(p.rowwise.random.key || p.columnwise.random.key, [&](auto stochastic) {
        return visit(QuantizeNvfp4<decltype(e), decltype(tiles)::value, decltype(stochastic)::value>{});
      });
    });
  });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_nvfp4, QuantizeProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
