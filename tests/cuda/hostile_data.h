// Codes, scales and elements that kernels may meet.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "../cpp/format_makers.h"
#include "../cpp/kernel_data.h"

namespace jaxlowprec {

/// Any byte: every code and scale, NaN, infinity, zero and subnormal ones included.
inline std::vector<uint8_t> any_bytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

/// Ordinary numbers, and among them zeros of either sign, subnormal numbers and very large or small ones; NaN and infinity
/// where asked.
inline std::vector<uint8_t> any_elements(ElementType type, size_t count, uint32_t seed, bool finite = true) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const int range = type == ElementType::kF16 ? 14 : 120;
  std::vector<uint8_t> elements(count * reference::element_size(type));
  for (size_t i = 0; i < count; ++i) {
    float value = normal(random);
    switch (random() % 12) {
      case 0: value = random() % 2 ? 0.0f : -0.0f; break;
      case 1: value = Lanes<float>::from_bits((random() & kSignBit) | (random() & 0x007FFFFFu)); break;
      case 2: value = std::ldexp(value, static_cast<int>(random() % (2 * range)) - range); break;
      case 3: value = finite || random() % 8 ? value : random() % 2 ? INFINITY : -NAN; break;
      default: break;
    }
    reference::put(elements.data(), type, static_cast<int64_t>(i), value);
  }
  return elements;
}

// --- formats

constexpr Format kFormats[] = {nvfp4(false),
                               nvfp4(true),
                               mx(CodeType::kE2M1, false),
                               mx(CodeType::kE2M1, true),
                               mx(CodeType::kE4M3, false),
                               mx(CodeType::kE5M2, true),
                               float8_block(CodeType::kE4M3, false),
                               float8_block(CodeType::kE5M2, false),
                               float8_block(CodeType::kE4M3, true),
                               float8_tensor(CodeType::kE4M3),
                               float8_tensor(CodeType::kE5M2),
                               line_format(CodeType::kE4M3),
                               line_format(CodeType::kE5M2, ElementType::kBF16),
                               line_format(CodeType::kInt8),
                               line_format(CodeType::kInt8, ElementType::kF16)};

inline std::string name(const Format& f) {
  const char* scalings[] = {" two-level", " e8m0", " float32", " tensor", " float16", " rows"};
  const bool integers = f.code == CodeType::kInt8;
  return (integers ? "int8" : std::string(with_float(f.code, [](auto element) { return decltype(element)::kName; }))) +
         scalings[static_cast<int>(f.scaling)] + (f.tiles ? " tiles" : "");
}

/// Codes and scales of [batch, rows, columns] elements. float32 scales: powers of two where the format says so, and poison.
struct AnyCodes {
  std::vector<uint8_t> data, scale;
  std::vector<float> amax;

  AnyCodes(const Format& f, int64_t batch, int64_t rows, int64_t columns, uint32_t seed)
      : data(any_bytes(batch * rows * f.row_bytes(columns), seed)) {
    const int64_t scales = batch * f.scales(rows, columns);
    if (f.scaling == Scaling::kRows) {
      scale = any_elements(f.scale_type, scales, seed + 1, false);
    } else if (f.scale_bytes() == 1) {
      scale = any_bytes(scales, seed + 1);
    } else {
      scale = any_elements(ElementType::kF32, scales, seed + 1, false);
      for (int64_t i = 0; i < scales && f.power_of_two; ++i) scale[4 * i] = scale[4 * i + 1] = 0, scale[4 * i + 2] &= 0x80u;
      for (int64_t i = 0; i < scales; ++i) scale[4 * i + 3] &= 0x7Fu;
    }
    const float several[] = {3.0f, 1e-30f, INFINITY, 3e38f};
    for (int64_t b = 0; b < batch; ++b) amax.push_back(several[b % 4]);
  }
};

}  // namespace jaxlowprec
