// GEMMs of quantised operands; for AVX512_BF16 those that it has of its own (bf16_kernels.cc).
#include "../entry.h"
#include "matmul_float8.h"
#if !defined(JLP_ISA_AVX512_BF16)
#include "matmul_e2m1.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve([[maybe_unused]] const MatmulProblem& p, Visit visit) {
#if !defined(JLP_ISA_AVX512_BF16)
  if (p.packed())
    return p.a.format.scaling == Scaling::kTwoLevel ? visit(MatmulE2M1<Nvfp4Scales>{}) : visit(MatmulE2M1<Mxfp4Scales>{});
#endif
  return visit(MatmulFloat8{});
}

}  // namespace

JLP_DEFINE_ENTRY(matmul, MatmulProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
