// The scales that NVFP4 blocks may take, and the errors that a rule compares them by (numerics.md 13).
//
// Where the tensor's amax and the scales are nowhere near float32's limits, which is nearly everywhere, the work is less: no
// product saturates but those of the scale below that of 6; those of the scale of 4 have no code above that of 4; and what a
// code decodes to is one of two numbers a block, A for 1 and B for 1.5, times a power of two.
#pragma once

#include "../../numerics/scale_rules.h"
#include "sixteens.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The tensor's numbers, and whether they are far from float32's limits.
struct RoomScale : Nvfp4RoomScale {
  bool middling;

  explicit RoomScale(float amax) : Nvfp4RoomScale(nvfp4_room_scale(amax)), middling(amax > 0x1p-80f && amax < 0x1p100f) {}
};

/// A scale to try on kLanes blocks.
struct Trial : TriedScale<F32> {
  F32 minus_encode;

  /// Becomes another in lanes where that is better, but for `value`.
  template <class Mask>
  __attribute__((always_inline)) void replace(const Trial& other, Mask better) {
    byte = better ? other.byte : byte;
    minus_encode = better ? other.minus_encode : minus_encode;
  }
};

/// The scales to try on kLanes blocks.
template <ScaleError kError>
struct Trials {
  static constexpr int kCount = scales_tried(kError);
  Trial trial[kCount];
  bool middling;  // all is far from float32's limits

  __attribute__((always_inline)) void set(U32 amax, const RoomScale& tensor) {
    TriedScale<F32> scales[kCount];
    const F32 minus = -L::from_bits(amax);
    nvfp4_scales(L::from_bits(amax), tensor.encode, scales);
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) {
      static_cast<TriedScale<F32>&>(trial[t]) = scales[t];
      trial[t].minus_encode = -nvfp4_block_encode_by_value(scales[t].value, tensor.decode);
    }
    middling =
        tensor.middling && all_below(minus * trial[0].minus_encode, 7.0f) && all_below(minus * trial[1].minus_encode, 4.5f);
  }
};

/// x / 1536, rounded once, of an x that is far from float32's limits.
JLP_RULE F32 divided_by_room(F32 x) {
#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
  const F32 third = L::splat(0x1.555556p-2f), q = x * third;  // 1536 is 3 * 2^9; the remainder is exact, and corrects q
  return L::fused_multiply_add(L::fused_multiply_add(L::splat(-3.0f), q, x), third, q) * 0x1p-9f;
#else
  return x / kNvfp4Room;
#endif
}

/// b where the sign bit of `sign` is set, else a.
JLP_RULE F32 by_sign(F32 sign, F32 a, F32 b) {
#if defined(JLP_ISA_AVX512)
  return (F32)_mm512_mask_blend_ps(_mm512_movepi32_mask(raw((U32)sign)), raw(a), raw(b));
#elif defined(JLP_ISA_AVX2)
  return (F32)_mm256_blendv_ps(raw(a), raw(b), raw(sign));
#else
  return (I32)sign < 0 ? b : a;
#endif
}

/// kE2M1Numbers over A, or negative, over B, which is 1.5 A up to rounding.
constexpr float kPowersOfHalves[8] = {0.0f, 0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 4.0f, -4.0f};

/// The sums of the errors of 16 elements, by each of the scales.
template <ScaleError kError>
struct Errors {
  static constexpr int kCount = scales_tried(kError);
  F32 sum[kCount];

  __attribute__((noinline)) void add_up(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    trials.middling ? add_up_by<true>(x, trials, tensor) : add_up_by<false>(x, trials, tensor);
  }

  /// Puts the best of the scales first; an equal error keeps the earlier one.
  __attribute__((always_inline)) void choose(Trials<kError>& trials) {
    JLP_UNROLL(2)
    for (int t = 1; t < kCount; ++t) {
      const auto better = sum[t] < sum[0];
      sum[0] = better ? sum[t] : sum[0];
      trials.trial[0].replace(trials.trial[t], better);
    }
  }

 private:
  struct Units {
    F32 one, minus_three_halves;  // A, and -B
  };

  template <bool kMiddling>
  __attribute__((always_inline)) void add_up_by(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    Units units[kCount];
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) {
      const F32 scale = trials.trial[t].value;
      units[t] = {divided_by_room(scale * tensor.amax), -divided_by_room(scale * 1.5f * tensor.amax)};
      sum[t] = F32{};
    }
    const auto add = [&](auto place) __attribute__((always_inline)) {
      const F32 minus = load<F32>(x.minus[place]);
      sum[0] += error_of<kMiddling, 0>(minus, trials.trial[0], units[0], tensor);
      sum[1] += error_of<kMiddling, 1>(minus, trials.trial[1], units[1], tensor);
      if constexpr (kCount > 2) sum[2] += error_of<kMiddling, 2>(minus, trials.trial[2], units[2], tensor);
    };
    for_each_place(add, std::make_integer_sequence<int, kBlock>());
  }

  /// That of elements made negative, by the t-th scale.
  template <bool kMiddling, int t>
  JLP_RULE F32 error_of(F32 minus, const Trial& trial, const Units& units, const RoomScale& tensor) {
    const F32 y = minus * trial.minus_encode;
    U32 code;
    if constexpr (kMiddling && t == 1)
      code = e2m1_magnitude_bits_to_four(y);
    else
      code = e2m1_magnitude_bits(kMiddling && t == 0 ? y : L::min(y, L::splat(kE2M1Max)));
    F32 d;
    if constexpr (!kMiddling) {
      return nvfp4_error<kError>(-minus, of_code(kE2M1Numbers, code), trial.value, tensor);
    } else if constexpr (kError == ScaleError::kRelativeSquared) {
      d = L::multiply_add_exact(of_code(kE2M1Numbers, code), trial.value, minus * tensor.encode);
    } else {
      const F32 power = of_code(kPowersOfHalves, code);
      d = L::multiply_add_exact(power, by_sign(power, units.one, units.minus_three_halves), minus);
    }
    return kError == ScaleError::kAbsolute ? absolute(d) : d * d;
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
