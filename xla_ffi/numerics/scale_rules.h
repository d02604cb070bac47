// NVFP4 whose blocks take the best of several scales (numerics.md 13).
#pragma once

#include "nvfp4.h"

namespace jaxlowprec {

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

}  // namespace jaxlowprec
