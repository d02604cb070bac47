// The scale of a block of NVFP4 corrected for the errors of its codes and rounded stochastically (numerics.md 14): a thread
// has the block's 16 elements and adds up both sums in order.
#pragma once

#include "../../numerics/eden.h"
#include "best_scale.cuh"

namespace jaxlowprec {
namespace cuda {

/// A block's random bits: of the call that four blocks of a line share, its own word's.
JLP_DEVICE uint32_t random_scale_bits(const RoundKeys<true>& keys, const Random& random, int64_t line, int64_t block) {
  const uint32_t index = random.sixteens[keys.sixteens + block];
  uint32_t words[4] = {index / kEdenBlocks, random.rows[keys.rows + line], random.stream, 0};
  philox_rounds(keys, words);
  const uint32_t low = index % 2 ? words[1] : words[0], high = index % 2 ? words[3] : words[2];
  return eden_bits<float>(index % 4 < 2 ? low : high);
}

/// Sets what is stored of a block's scale; that of a poisoned one stays. Nothing to do for other kernels than eden's, or
/// where the block does not exist.
template <Scales kScales, bool kStochastic, class E>
JLP_DEVICE void correct_scale(const Sixteen<E>& sixteen, const RoundKeys<kStochastic>& keys, const Random& random,
                              int64_t line, int64_t block, bool exists, BlockScale& scale) {
  if constexpr (kEden<kScales, kStochastic>) {
    if (!exists || BlockScale::poisoned(scale)) return;
    float energy = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float a = __fmul_rn(fabsf(value(sixteen, i)), scale.encode);
      const uint32_t code = e2m1_nearest_bits(fminf(a, kE2M1Max)) - kE2M1MagicBits;
      eden_add(a, e2m1_decode<float>(code), energy, product);
    }
    const uint32_t bits = random_scale_bits(keys, random, line, block);
    scale.stored = eden_scale(float8_decode<E4M3, float>(scale.stored), energy, product, bits);
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
