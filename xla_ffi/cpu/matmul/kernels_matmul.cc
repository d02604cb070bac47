// GEMMs of quantised operands.
#include "../entry.h"
#include "matmul_e2m1.h"
#include "matmul_float8.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve(const MatmulProblem& p, Visit visit) {
  if (!p.packed()) return visit(MatmulFloat8{});
  return p.a.format.scaling == Scaling::kTwoLevel ? visit(MatmulE2M1<Nvfp4Scales>{}) : visit(MatmulE2M1<Mxfp4Scales>{});
}

}  // namespace

JLP_DEFINE_ENTRY(matmul, MatmulProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
