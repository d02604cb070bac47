// MS-EDEN: the scale of an NVFP4 block, corrected for the errors of its codes and rounded stochastically (numerics.md 14).
#pragma once

#include "float8.h"
#include "nvfp4.h"

namespace jaxlowprec {

/// The stream of the bits of rowwise scales; that of columnwise ones follows.
constexpr uint32_t kEdenStream = 2;
/// One call of Philox serves as many blocks of a line, each with the upper bits of a word.
constexpr int kEdenBlocks = 4;
constexpr int kEdenShift = 12;

/// The random bits of a block, by its index, of its call's words.
template <class F>
JLP_RULE Uint<F> eden_bits(Uint<F> word) {
  return word >> kEdenShift;
}

/// What both sums of a block's scaled elements, of magnitudes a that became numbers, grow by.
template <class F>
JLP_RULE void eden_add(F a, F number, F& energy, F& product) {
  using L = Lanes<F>;
  energy += L::flush(a * a);
  product += L::flush(a * number);
}

/// The E4M3 byte of a block that was scaled by `scale`. Where the ratio is none, as in a block whose codes are zeros, it
/// counts as 1.
template <class F>
JLP_RULE Uint<F> eden_scale(F scale, F energy, F product, Uint<F> bits) {
  using L = Lanes<F>;
  constexpr int kShift = 23 - E4M3::kMantissaBits;
  const F ratio = energy / product;
  const F t = L::flush(scale * (magnitude(ratio) < kInfinityBits ? ratio : L::splat(1.0f)));
  // As float8_magnitude_stochastic: a carry into the code out of float32's own bits, or of fixed point where the grid is
  // even.
  const Uint<F> normal = ((L::bits(t) + bits) >> kShift) - (static_cast<uint32_t>(127 - E4M3::kBias) << E4M3::kMantissaBits);
  const Uint<F> subnormal = (L::truncate(L::min(t, L::splat(E4M3::kMinNormal)) * 0x1p29f) + bits) >> kShift;
  const Uint<F> byte = t >= E4M3::kMinNormal ? normal : subnormal;
  return byte < kFloat8NaN ? byte : fill<F>(kFloat8NaN - 1u);
}

}  // namespace jaxlowprec
