// From sums to the vector that jaxlowprec/telemetry/counting.py names: a few hundred numbers a tensor, for which XLA would
// compile dozens of loops. The rules for host and device; the CPU's loop is `finish`, the GPU's in
// cuda/statistics/statistics.cu.
#pragma once

#include "numerics/float8.h"
#include "problems.h"

namespace jaxlowprec {

constexpr int kScalars = 15, kOctaves = 32, kChannels = 4;
constexpr int kVector = kScalars + kSumsCodes + kOctaves + 2 * kChannels;
constexpr int kVectorCodesFrom = kScalars, kVectorOctavesFrom = kVectorCodesFrom + kSumsCodes,
              kVectorChannelsFrom = kVectorOctavesFrom + kOctaves;

/// What is known of a tensor beside its sums.
struct KnownOfTensor {
  float amax, rms, outliers;
  const float* channels;  // [2 * kChannels]
};

/// A bin of scales: its value, -1 where that is no number, and the power of two at or below it.
struct ScaleBin {
  float value;
  int octave;
};

JLP_RULE ScaleBin scale_bin(Scaling scaling, int bin) {
  if (scaling == Scaling::kTwoLevel) {
    const float value = float8_decode<E4M3, float>(static_cast<uint32_t>(bin));
    const int octave = static_cast<int>(Lanes<float>::bits(value) >> 23) - 127;
    return bin < static_cast<int>(kFloat8NaN) ? ScaleBin{value, octave} : ScaleBin{-1.0f, 0};
  }
  const uint32_t bits = bin == 0 ? kMinNormalBits / 2 : static_cast<uint32_t>(bin) << 23;  // 2^-127 is subnormal
  return bin < 0xFF ? ScaleBin{Lanes<float>::from_bits(bits), bin - 127} : ScaleBin{-1.0f, 0};
}

/// What there is to say of the blocks' scales.
struct ScalesInUse {
  float smallest, largest;  // 0 where there are none
  float blocks, at_floor;   // how many; of these, how many have the smallest scale that the format has
  int octave;               // of the largest
};

JLP_RULE ScalesInUse scales_in_use(Scaling scaling, const float* by_scale) {
  const int floor = scaling == Scaling::kTwoLevel ? 1 : scaling == Scaling::kE8M0 ? 0 : -1;
  ScalesInUse found = {0.0f, 0.0f, 0.0f, 0.0f, -127};
  for (int i = 0; i < kSumsScales; ++i) {
    const ScaleBin bin = scale_bin(scaling, i);
    if (bin.value < 0 || !(by_scale[i] > 0)) continue;
    if (!(found.blocks > 0)) found.smallest = bin.value;  // values ascend
    found.largest = bin.value, found.octave = bin.octave;
    found.blocks += by_scale[i];
    if (i <= floor) found.at_floor += by_scale[i];
  }
  return found;
}

/// How many octaves a bin lies below the largest scale in use; -1 where it is no number.
JLP_RULE int octaves_below(const ScalesInUse& scales, const ScaleBin& bin) {
  const int below = scales.octave - bin.octave;
  return bin.value < 0 ? -1 : below < kOctaves - 1 ? below : kOctaves - 1;
}

JLP_RULE float ratio(float part, float whole) { return whole > 0 ? part / whole : 0.0f; }

/// The first numbers of a vector.
JLP_RULE void write_scalars(const float* sums, const KnownOfTensor& known, const ScalesInUse& scales, float* out) {
  enum {
    kElements,
    kZeros,
    kUnderflow,
    kSaturation,
    kNonfinite,
    kPoisoned,
    kError,
    kMagnitude,
    kSquare,
    kEnergy,
    kRanges,
    kRuns
  };
  const float elements = sums[kElements];
  out[0] = 1.0f;
  for (int i = kZeros; i <= kPoisoned; ++i) out[i] = sums[i] / elements;
  out[6] = ratio(sums[kSquare], sums[kEnergy]);
  out[7] = ratio(sums[kError], sums[kMagnitude]);
  out[8] = known.amax;
  out[9] = known.rms;
  out[10] = scales.smallest;
  out[11] = scales.largest;
  out[12] = ratio(scales.at_floor, scales.blocks);
  out[13] = ratio(sums[kRanges], sums[kRuns]);
  out[14] = known.outliers;
}

/// A tensor's vector.
inline void finish(const float* sums, const KnownOfTensor& known, Scaling scaling, float* out) {
  const float* by_scale = sums + kSumsScalesFrom;
  const ScalesInUse scales = scales_in_use(scaling, by_scale);
  write_scalars(sums, known, scales, out);
  for (int i = 0; i < kSumsCodes; ++i) out[kVectorCodesFrom + i] = sums[kSumsCodesFrom + i] / sums[0];
  float* octaves = out + kVectorOctavesFrom;
  for (int i = 0; i < kOctaves; ++i) octaves[i] = 0.0f;
  for (int i = 0; i < kSumsScales; ++i) {
    const int below = octaves_below(scales, scale_bin(scaling, i));
    if (below >= 0 && by_scale[i] > 0) octaves[below] += by_scale[i] / scales.blocks;
  }
  for (int i = 0; i < 2 * kChannels; ++i) out[kVectorChannelsFrom + i] = known.channels[i];
}

}  // namespace jaxlowprec
