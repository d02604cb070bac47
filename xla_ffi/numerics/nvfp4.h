// NVFP4: E2M1 codes, one E4M3 decode scale per block, one float32 amax per tensor (numerics.md 2).
#pragma once

#include "e2m1.h"
#include "float8.h"
#include "lanes.h"

namespace jaxlowprec {

constexpr int kNvfp4Block = 16;
constexpr float kNvfp4ProductScale =
    1.384017167538331705145537853240966796875e-07f;  // 1 / 2688^2: a GEMM's alpha a unit amax

/// What a tensor's amax fixes for all of its blocks.
struct Nvfp4TensorScale {
  float decode;      // S_dec
  float multiplier;  // fl(S_enc / 6): block amax to block scale
  bool usable;       // false: not finite or negative, the whole tensor decodes to NaN (numerics.md 1)
};

/// Block amax to block scale, from S_enc.
JLP_RULE float nvfp4_multiplier(float encode) { return encode * 0.16666667163372039794921875f; }

JLP_RULE Nvfp4TensorScale nvfp4_tensor_scale(float amax) {
  using L = Lanes<float>;
  const uint32_t bits = magnitude(amax);
  const float g = L::flush(amax);
  const float largest = 8.5070591730234616e37f;  // 2^126 keeps S_dec normal
  const float encode = g == 0.0f ? 1.0f : L::min(2688.0f / g, largest);
  return {1.0f / encode, nvfp4_multiplier(encode), bits < kInfinityBits && !(g < 0.0f)};
}

/// S_b, the stored E4M3 byte of a block with the given finite amax.
template <class F>
JLP_RULE Uint<F> nvfp4_block_scale(F block_amax, float multiplier) {
  using L = Lanes<F>;
  return float8_encode_magnitude<E4M3>(L::min(block_amax * multiplier, L::splat(kMaxFinite)));
}

/// The same, and what it decodes to.
template <class F>
JLP_RULE Uint<F> nvfp4_block_scale(F block_amax, float multiplier, F& decoded) {
  using L = Lanes<F>;
  return float8_encode_magnitude<E4M3>(L::min(block_amax * multiplier, L::splat(kMaxFinite)), decoded);
}

/// enc: what the elements of a block are multiplied by whose scale decodes to `decoded`. S_b = 0 gives the largest finite
/// number.
template <class F>
JLP_RULE F nvfp4_block_encode_by_value(F decoded, float tensor_decode) {
  using L = Lanes<F>;
  return L::min(1.0f / L::flush(decoded * tensor_decode), L::splat(kMaxFinite));
}
template <class F>
JLP_RULE F nvfp4_block_encode(Uint<F> block_scale, float tensor_decode) {
  return nvfp4_block_encode_by_value(float8_decode<E4M3, F>(block_scale), tensor_decode);
}

/// What a number of the tensor's units, E2M1(code) * S_b, is worth: times amax / 2688, left to right, subnormals flushed.
template <class F>
JLP_RULE F nvfp4_value(F relative, float amax) {
  using L = Lanes<F>;
  return L::flush(L::flush(relative * amax) * 3.7202381645329296588897705078125e-4f);
}

/// E2M1(code) * S_b * amax / 2688.
template <class F>
JLP_RULE F nvfp4_decode(Uint<F> code, F block_scale, float amax) {
  return nvfp4_value<F>(e2m1_decode<F>(code) * block_scale, amax);
}

}  // namespace jaxlowprec
