// From sums to the vector that jaxlowprec/telemetry/counting.py names: a few hundred numbers a tensor, for which XLA would
// compile dozens of loops.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../numerics/float8.h"
#include "../../problems.h"

namespace jaxlowprec {

constexpr int kScalars = 15, kOctaves = 32, kChannels = 4;
constexpr int kVector = kScalars + kSumsCodes + kOctaves + 2 * kChannels;

/// What is known of a tensor beside its sums.
struct KnownOfTensor {
  float amax, rms, outliers;
  const float* channels;  // [2 * kChannels]
};

/// The value of a bin of scales; -1 where that is no number.
inline float scale_of_bin(Scaling scaling, int bin) {
  if (scaling == Scaling::kTwoLevel)
    return bin < kFloat8NaN ? float8_decode<E4M3, float>(static_cast<uint32_t>(bin)) : -1.0f;
  return bin < 0xFF ? std::ldexp(1.0f, bin - 127) : -1.0f;
}

inline void finish(const float* sums, const KnownOfTensor& known, Scaling scaling, float* out) {
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
  const auto ratio = [](float part, float whole) { return whole > 0 ? part / whole : 0.0f; };
  const float elements = sums[kElements];
  const float* by_scale = sums + kSumsScalesFrom;
  const int floor = scaling == Scaling::kTwoLevel ? 1 : scaling == Scaling::kE8M0 ? 0 : -1;
  float smallest = 0, largest = 0, blocks = 0, at_floor = 0;
  for (int bin = 0; bin < kSumsScales; ++bin) {
    const float value = scale_of_bin(scaling, bin);
    if (value < 0 || !(by_scale[bin] > 0)) continue;
    smallest = blocks > 0 ? std::min(smallest, value) : value;
    largest = std::max(largest, value);
    blocks += by_scale[bin];
    if (bin <= floor) at_floor += by_scale[bin];
  }
  const float scalars[kScalars] = {1.0f,
                                   sums[kZeros] / elements,
                                   sums[kUnderflow] / elements,
                                   sums[kSaturation] / elements,
                                   sums[kNonfinite] / elements,
                                   sums[kPoisoned] / elements,
                                   ratio(sums[kSquare], sums[kEnergy]),
                                   ratio(sums[kError], sums[kMagnitude]),
                                   known.amax,
                                   known.rms,
                                   smallest,
                                   largest,
                                   ratio(at_floor, blocks),
                                   ratio(sums[kRanges], sums[kRuns]),
                                   known.outliers};
  std::copy_n(scalars, kScalars, out);
  float* codes = out + kScalars;
  for (int i = 0; i < kSumsCodes; ++i) codes[i] = sums[kSumsCodesFrom + i] / elements;
  float* octaves = codes + kSumsCodes;
  std::fill_n(octaves, kOctaves, 0.0f);
  for (int bin = 0; bin < kSumsScales; ++bin) {
    const float value = scale_of_bin(scaling, bin);
    if (value < 0 || !(by_scale[bin] > 0)) continue;
    const int below = value > 0 ? std::ilogb(largest) - std::ilogb(value) : kOctaves;
    octaves[std::min(below, kOctaves - 1)] += by_scale[bin] / blocks;
  }
  std::copy_n(known.channels, 2 * kChannels, octaves + kOctaves);
}

}  // namespace jaxlowprec
