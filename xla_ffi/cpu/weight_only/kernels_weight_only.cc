// GEMMs of activations in high precision with a quantised weight; for AVX512_BF16 those that it has of its own
// (bf16_kernels.cc).
#include "../entry.h"
#include "matmul_weight_only.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve(const WeightOnlyProblem& p, Visit visit) {
  return with_weight_rows(p.weight.format, [&](auto kind) { return visit(WeightOnly<typename decltype(kind)::type>{}); });
}

}  // namespace

JLP_DEFINE_ENTRY(weight_only, WeightOnlyProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
