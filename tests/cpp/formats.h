// Binary floating-point formats by their textbook definition: what the encoders and decoders are tested against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../xla_ffi/numerics/lanes.h"

namespace jaxlowprec {

/// A binary floating-point format: magnitude codes 0 to count - 1 in order, each with its value.
class Format {
 public:
  /// The last code may stand for infinity: its value then is the one that the next finite number would have.
  Format(int mantissa_bits, int bias, uint32_t count) {
    for (uint32_t code = 0; code < count; ++code) {
      const int exponent = static_cast<int>(code >> mantissa_bits), mantissa = code & ((1 << mantissa_bits) - 1);
      const double significand = exponent ? mantissa + std::ldexp(1, mantissa_bits) : mantissa;
      values_.push_back(std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits));
    }
  }
  uint32_t count() const { return static_cast<uint32_t>(values_.size()); }
  double value(uint32_t code) const { return values_[code]; }

  /// The largest code whose value is not above a >= 0.
  uint32_t floor(double a) const {
    return static_cast<uint32_t>(std::upper_bound(values_.begin(), values_.end(), a) - values_.begin()) - 1;
  }

  /// The code of the value nearest to a >= 0, ties to the even code, saturating.
  uint32_t nearest(double a) const {
    const auto above = std::lower_bound(values_.begin(), values_.end(), a);
    if (above == values_.end()) return count() - 1;
    const uint32_t high = static_cast<uint32_t>(above - values_.begin()), low = high ? high - 1 : 0;
    const double down = a - values_[low], up = values_[high] - a;
    if (down == up) return high % 2 ? low : high;
    return down < up ? low : high;
  }

 private:
  std::vector<double> values_;
};

inline const Format e2m1(1, 1, 8);
inline const Format e4m3(3, 7, 127);
inline const Format e5m2(2, 15, 124);
inline const Format f16(10, 15, 0x7C01);
inline const Format bf16(7, 127, 0x7F81);

inline float bf16_number(uint32_t bits) { return Lanes<float>::from_bits(bits << 16); }

}  // namespace jaxlowprec
