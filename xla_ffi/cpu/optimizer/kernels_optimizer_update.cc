#include "../entry.h"
#include "optimizer_update.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve_optimizer_update(const OptimizerUpdateProblem& p, Visit visit) {
  return p.rule == UpdateRule::kLion ? visit(OptimizerUpdate<Lion>{}) : visit(OptimizerUpdate<AdamW>{});
}

}  // namespace

JLP_DEFINE_ENTRY(optimizer_update, OptimizerUpdateProblem, resolve_optimizer_update)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
