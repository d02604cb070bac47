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

// --- NVFP4 whose blocks take the best of several scales (numerics.md 13).

constexpr float kNvfp4Room = 1536.0f;  // 256 * 6: what the tensor's amax is scaled to, so that there is room above
constexpr int kMostScales = 3;         // that a rule tries

/// The error that a rule compares scales by.
enum class ScaleError { kAbsolute, kSquared, kRelativeSquared };
/// Scales that a rule with this error tries: those of 6 and of 4; the last one also that below the scale of 6.
constexpr int scales_tried(ScaleError error) { return error == ScaleError::kRelativeSquared ? 3 : 2; }

/// What a tensor's amax fixes for all of its blocks.
struct Nvfp4RoomScale {
  float amax;            // g
  float encode, decode;  // S_enc, S_dec
};

JLP_RULE Nvfp4RoomScale nvfp4_room_scale(float amax) {
  using L = Lanes<float>;
  const float g = L::flush(amax), largest = 8.5070591730234616e37f;  // 2^126
  const float encode = g == 0.0f ? 1.0f : L::min(kNvfp4Room / g, largest);
  return {g, encode, 1.0f / encode};
}

/// A scale to try: its byte and what that decodes to.
template <class F>
struct TriedScale {
  Uint<F> byte;
  F value;
};

/// The scales to try of blocks with the given finite amax, in order.
template <class F, int kCount>
JLP_RULE void nvfp4_scales(F block_amax, float tensor_encode, TriedScale<F> (&scales)[kCount]) {
  using L = Lanes<F>;
  const F base = L::flush(L::flush(block_amax / 6.0f) * tensor_encode);
  scales[0].byte = float8_encode_magnitude<E4M3>(base, scales[0].value);
  scales[1].byte = float8_encode_magnitude<E4M3>(base * 1.5f, scales[1].value);
  if constexpr (kCount > 2) {
    const Uint<F> six = scales[0].byte;
    scales[2].byte = six >= 2u ? six - 1u : six;  // or the same again, which is not better
    scales[2].value = float8_decode<E4M3, F>(scales[2].byte);
  }
}

/// The error of an element of magnitude a that became `number` times the scale.
template <ScaleError kError, class F>
JLP_RULE F nvfp4_error(F a, F number, F scale, const Nvfp4RoomScale& tensor) {
  using L = Lanes<F>;
  const F relative = number * scale;  // exact
  F d;
  if constexpr (kError == ScaleError::kRelativeSquared)
    d = L::flush(relative - L::flush(a * tensor.encode));
  else
    d = L::flush(L::flush(L::flush(relative * tensor.amax) / kNvfp4Room) - a);
  return kError == ScaleError::kAbsolute ? absolute(d) : L::flush(d * d);
}

// --- MS-EDEN: the scale of an NVFP4 block, corrected for the errors of its codes and rounded stochastically (numerics.md
// 14).

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
