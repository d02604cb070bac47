#include "../entry.h"
#include "adamw_update.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve_adamw_update(const AdamWUpdateProblem&, Visit visit) {
  return visit(AdamWUpdate{});
}

}  // namespace

JLP_DEFINE_ENTRY(adamw_update, AdamWUpdateProblem, resolve_adamw_update)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
