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

Kernels kernels() {
  Kernels k = avx512::kernels;
  k.isa = "avx512_bf16", k.matmul_chunks = matmul_chunks, k.matmul_chunk = matmul_chunk;
  k.weight_only_chunks = weight_only_chunks, k.weight_only_chunk = weight_only_chunk;
  return k;
}

}  // namespace avx512_bf16
}  // namespace jaxlowprec
