// Pairs of bfloat16 and AVX512_BF16's dot product of them.
//
// That instruction is two fused multiply-adds in turn, each rounded to nearest even, subnormals being zero: the upper half's
// first. So the number that comes first in a sum goes into the upper half, and a chain of dot products is the chain of fused
// multiply-adds of the other instruction sets, byte for byte. bf16_dot_check.h holds the processor to it.
#pragma once

#include "../vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Numbers that bfloat16 holds exactly.
JLP_RULE U32 pair(F32 first, F32 second) { return L::bits(first) | (L::bits(second) >> 16); }

/// sums + first * first + second * second, rounded after each product. (Not the masked forms: g++ drops half the mask.)
JLP_RULE F32 add_products_of_pairs(U32 a, U32 b, F32 sums) {
  return (F32)_mm512_dpbf16_ps(raw(sums), (__m512bh)raw(a), (__m512bh)raw(b));
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
