// AVX-512's kernels with GEMMs by AVX512_BF16's dot product: of 8-bit codes, and of bfloat16 activations with a quantised
// weight. Neither function may be called before the processor is known to have that, AVX-512 as dispatch.cc asks for it, and
// AVX512_VBMI.
#pragma once

#include "../kernels.h"

namespace jaxlowprec {
namespace avx512_bf16 {

/// Whether this processor's dot product gives the bytes that the other instruction sets give.
bool dot_gives_the_same_bytes();

Kernels kernels();

}  // namespace avx512_bf16
}  // namespace jaxlowprec
