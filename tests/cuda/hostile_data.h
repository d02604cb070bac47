// Codes, scales and elements that kernels may meet, and comparing their results byte for byte.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "../cpp/reference_elements.h"

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

/// Index of the first element that differs, -1 for none: bytes, but any NaN is as good as another, since which of two an
/// addition passes on is the processor's choice.
inline int64_t first_difference(const void* a, const void* b, ElementType type, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t x = reference::get_bits(a, type, i), y = reference::get_bits(b, type, i);
    if (x != y && !(std::isnan(reference::number(x, type)) && std::isnan(reference::number(y, type)))) return i;
  }
  return -1;
}

constexpr ElementType kElementTypes[] = {ElementType::kBF16, ElementType::kF16, ElementType::kF32};

inline std::string name(ElementType type) {
  return type == ElementType::kBF16 ? "bf16" : type == ElementType::kF16 ? "f16" : "f32";
}

// --- formats, as jaxlowprec/formats.py has them

constexpr Format nvfp4(bool tiles) { return {CodeType::kE2M1, Scaling::kTwoLevel, 16, tiles, ScaleRule::kUp, false, 0}; }
constexpr Format mxfp(CodeType code, bool tiles) { return {code, Scaling::kE8M0, 32, tiles, ScaleRule::kUp, false, 0}; }
constexpr Format float8_block(CodeType code, bool tiles) {
  return {code, Scaling::kFloat32, 128, tiles, ScaleRule::kUp, true, 0};
}
constexpr Format float8_tensor(CodeType code) { return {code, Scaling::kTensor, 1, false, ScaleRule::kUp, false, 0}; }

constexpr Format kFormats[] = {nvfp4(false),
                               nvfp4(true),
                               mxfp(CodeType::kE2M1, false),
                               mxfp(CodeType::kE2M1, true),
                               mxfp(CodeType::kE4M3, false),
                               mxfp(CodeType::kE5M2, true),
                               float8_block(CodeType::kE4M3, false),
                               float8_block(CodeType::kE5M2, false),
                               float8_block(CodeType::kE4M3, true),
                               float8_tensor(CodeType::kE4M3),
                               float8_tensor(CodeType::kE5M2)};

inline std::string name(const Format& f) {
  const char* codes[] = {"E2M1", "E4M3", "E5M2"};
  const char* scalings[] = {" two-level", " E8M0", " float32", " tensor"};
  return std::string(codes[static_cast<int>(f.code)]) + scalings[static_cast<int>(f.scaling)] + (f.tiles ? " tiles" : "");
}

/// Codes and scales of [batch, rows, columns] elements. float32 scales: powers of two where the format says so, and poison.
struct AnyCodes {
  std::vector<uint8_t> data, scale;
  std::vector<float> amax;

  AnyCodes(const Format& f, int64_t batch, int64_t rows, int64_t columns, uint32_t seed)
      : data(any_bytes(batch * rows * f.row_bytes(columns), seed)) {
    const int64_t scales = batch * f.scales(rows, columns);
    if (f.scale_bytes() == 1) {
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
