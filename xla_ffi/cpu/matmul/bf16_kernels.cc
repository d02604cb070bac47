#include "bf16_kernels.h"

#include "../entry.h"
#include "bf16_dot_check.h"
#include "matmul_pairs.h"

namespace jaxlowprec {
namespace avx512 {
extern const Kernels kernels;
}

namespace avx512_bf16 {

bool dot_gives_the_same_bytes() {
  return dot_is_two_fused_multiply_adds([](U32 a, U32 b, F32 sums) { return add_products_of<true>(a, b, sums); });
}

Kernels kernels() {
  Kernels k = avx512::kernels;
  k.isa = "avx512_bf16", k.matmul_chunks = matmul_chunks, k.matmul_chunk = matmul_chunk;
  return k;
}

}  // namespace avx512_bf16
}  // namespace jaxlowprec
