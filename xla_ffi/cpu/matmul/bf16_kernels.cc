#include "bf16_kernels.h"

#include "../entry.h"
#include "bf16_dot_check.h"
#include "bf16_pair.h"

namespace jaxlowprec {
namespace avx512 {
extern const Kernels kernels;
}

namespace avx512_bf16 {

bool dot_gives_the_same_bytes() { return dot_is_two_fused_multiply_adds(add_products_of_pairs); }

namespace {

// Whether the operands of a GEMM are pairs of bfloat16. AVX-512 has the kernels of the others.

bool by_pairs(const MatmulProblem& p) { return !p.packed() && p.a.format.code != CodeType::kInt8; }

bool by_pairs(const WeightOnlyProblem& p) {
  const Format& format = p.weight.format;
  const bool numbers_are_bf16 =
      format.code == CodeType::kInt4 ? format.scale_type == ElementType::kBF16 : format.scaling != Scaling::kFloat32;
  return p.x_type == ElementType::kBF16 && numbers_are_bf16;
}

int64_t matmul_chunks_of(const MatmulProblem& p) {
  return by_pairs(p) ? matmul_chunks(p) : avx512::kernels.matmul_chunks(p);
}
void chunk_of_matmul(const MatmulProblem& p, int64_t chunk) {
  by_pairs(p) ? matmul_chunk(p, chunk) : avx512::kernels.matmul_chunk(p, chunk);
}
int64_t weight_only_chunks_of(const WeightOnlyProblem& p) {
  return by_pairs(p) ? weight_only_chunks(p) : avx512::kernels.weight_only_chunks(p);
}
void chunk_of_weight_only(const WeightOnlyProblem& p, int64_t chunk) {
  by_pairs(p) ? weight_only_chunk(p, chunk) : avx512::kernels.weight_only_chunk(p, chunk);
}

}  // namespace

Kernels kernels() {
  Kernels k = avx512::kernels;
  k.isa = "avx512_bf16", k.matmul_chunks = matmul_chunks_of, k.matmul_chunk = chunk_of_matmul;
  k.weight_only_chunks = weight_only_chunks_of, k.weight_only_chunk = chunk_of_weight_only;
  return k;
}

}  // namespace avx512_bf16
}  // namespace jaxlowprec
