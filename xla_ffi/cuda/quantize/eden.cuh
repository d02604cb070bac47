// The scale of a block of NVFP4 corrected for the errors of its codes and rounded stochastically (numerics.md 14): a thread
// has the block's 16 elements and adds up both sums in order.
#pragma once

#include "../../numerics/nvfp4.h"
#include "quantize_scales.cuh"

namespace jaxlowprec {
namespace cuda {

// The best of several scales for a block of NVFP4 (numerics.md 13): a thread has the block's 16 elements, or those of one
// row of a tile, and adds up their errors by each scale in order.

template <Scales kScales>
constexpr ScaleError kScaleError = kScales == Scales::kBestAbsolute  ? ScaleError::kAbsolute
                                   : kScales == Scales::kBestSquared ? ScaleError::kSquared
                                                                     : ScaleError::kRelativeSquared;

/// A scale to try.
struct Trial : TriedScale<float> {
  float encode;
  float one, three_halves;  // what the codes of 1 and 1.5 decode to
};

template <Scales kScales>
struct Trials {
  static constexpr ScaleError kError = kScaleError<kScales>;
  static constexpr int kCount = scales_tried(kError);
  Trial trial[kCount];
  float error[kCount];

  JLP_DEVICE Trials of(const Matrix<kScales>& matrix, uint32_t amax, const EncodeTable& table) {
    Trials trials;
    TriedScale<float> scales[kCount];
    nvfp4_scales(as_float(amax < kInfinityBits ? amax : 0u), matrix.tensor.encode, scales);
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      static_cast<TriedScale<float>&>(trials.trial[t]) = scales[t];
      trials.trial[t].encode = table[scales[t].byte];
      trials.trial[t].one = __fmul_rn(scales[t].value, matrix.tensor.amax) / kNvfp4Room;
      trials.trial[t].three_halves = __fmul_rn(__fmul_rn(scales[t].value, 1.5f), matrix.tensor.amax) / kNvfp4Room;
    }
    return trials;
  }

  /// Adds up the errors of 16 elements.
  template <class E>
  __device__ __forceinline__ void add_up(const Matrix<kScales>& matrix, const Sixteen<E>& sixteen) {
    // Far from float32's limits what a code decodes to is one of two numbers times a power of two.
    const float g = matrix.tensor.amax;
    if (kError == ScaleError::kRelativeSquared || (g > 0x1p-80f && g < 0x1p100f))
      add_up<true>(matrix, sixteen);
    else
      add_up<false>(matrix, sixteen);
  }

  /// The block's scale: the first of those with the least error.
  __device__ __forceinline__ BlockScale best() const {
    BlockScale best = {trial[0].byte, trial[0].encode};
    float least = error[0];
#pragma unroll
    for (int t = 1; t < kCount; ++t) {
      const bool better = error[t] < least;
      best = better ? BlockScale{trial[t].byte, trial[t].encode} : best;
      least = better ? error[t] : least;
    }
    return best;
  }

 private:
  template <bool kMiddling, class E>
  __device__ __forceinline__ void add_up(const Matrix<kScales>& matrix, const Sixteen<E>& sixteen) {
#pragma unroll
    for (int t = 0; t < kCount; ++t) error[t] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float a = fabsf(value(sixteen, i));
#pragma unroll
      for (int t = 0; t < kCount; ++t) error[t] = __fadd_rn(error[t], error_by<kMiddling>(matrix, trial[t], a));
    }
  }

  template <bool kMiddling>
  JLP_DEVICE float error_by(const Matrix<kScales>& matrix, const Trial& trial, float a) {
    const uint32_t code = e2m1_nearest_bits(fminf(__fmul_rn(a, trial.encode), kE2M1Max)) - kE2M1MagicBits;
    if constexpr (!kMiddling) {
      return nvfp4_error<kError>(a, e2m1_decode<float>(code), trial.value, matrix.tensor);
    } else {
      float d;
      if constexpr (kError == ScaleError::kRelativeSquared) {
        d = __fmaf_rn(e2m1_decode<float>(code), trial.value, -__fmul_rn(a, matrix.tensor.encode));  // an exact product
      } else {
        const float power = code == 0 ? 0.0f : as_float(((code >> 1) + 126u) << 23);
        d = __fmaf_rn(power, (code & 1u) && code > 1u ? trial.three_halves : trial.one, -a);  // the same
      }
      return kError == ScaleError::kAbsolute ? fabsf(d) : __fmul_rn(d, d);
    }
  }
};

/// The scale of a block whose elements a thread has.
template <Scales kScales, class E>
JLP_DEVICE BlockScale scale_of(const Matrix<kScales>& matrix, const QuantizeArguments& a, const Sixteen<E>& sixteen,
                               uint32_t amax, const EncodeTable& table) {
  if constexpr (kIsChosen<kScales>) {
    Trials<kScales> trials = Trials<kScales>::of(matrix, amax, table);
    trials.add_up(matrix, sixteen);
    return amax >= matrix.poison_from ? BlockScale{kFloat8NaN, table[kFloat8NaN]} : trials.best();
  } else {
    return Matrix<kScales>::scale(matrix, a, amax, table);
  }
}

/// The scale of a tile whose rows 16 neighbouring lanes have, one each.
template <Scales kScales, class E>
JLP_DEVICE BlockScale scale_of_square(const Matrix<kScales>& matrix, const Sixteen<E>& row, uint32_t amax,
                                      const EncodeTable& table) {
  Trials<kScales> trials = Trials<kScales>::of(matrix, amax, table);
  trials.add_up(matrix, row);
#pragma unroll
  for (float& error : trials.error)
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
      error = __fadd_rn(error, as_float(__shfl_xor_sync(0xFFFFFFFFu, as_bits(error), distance)));
  return amax >= matrix.poison_from ? BlockScale{kFloat8NaN, table[kFloat8NaN]} : trials.best();
}

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
