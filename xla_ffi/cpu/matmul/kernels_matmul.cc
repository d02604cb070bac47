// GEMMs of quantised operands; for AVX512_BF16 and AMX those that they have of their own (bf16_kernels.cc, amx_kernels.cc).
#include "../entry.h"
#if !defined(JLP_ISA_AVX512_AMX)
#include "matmul_float8.h"
#endif
#if !defined(JLP_ISA_AVX512_BF16)
#include "matmul_int8.h"
#include "matmul_int8_by_nibbles.h"
#endif
#if !defined(JLP_ISA_AVX512_BF16) && !defined(JLP_ISA_AVX512_AMX)
#include "matmul_e2m1.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto resolve([[maybe_unused]] const MatmulProblem& p, Visit visit) {
#if defined(JLP_ISA_AVX512_BF16)
  return visit(MatmulFloat8{});
#else
#if !defined(JLP_ISA_AVX512_AMX)
  if (p.packed())
    return p.a.format.scaling == Scaling::kTwoLevel ? visit(MatmulE2M1<Nvfp4Scales>{}) : visit(MatmulE2M1<Mxfp4Scales>{});
  if (p.a.format.code != CodeType::kInt8) return visit(MatmulFloat8{});
#endif
  return p.b.format.packed() ? visit(MatmulInt8ByNibbles{}) : visit(MatmulInt8{});
#endif
}

}  // namespace

JLP_DEFINE_ENTRY(matmul, MatmulProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
