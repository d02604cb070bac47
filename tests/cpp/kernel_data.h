// Shared by the kernel tests of the CPU and of the GPU: buffers that end where their data ends, and hostile numbers.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "reference_elements.h"

namespace jaxlowprec {

/// Memory of exactly the given size, so that AddressSanitizer sees the first byte beyond it, filled with a pattern that
/// shows what was not written. 64-byte aligned, as XLA's buffers are, or deliberately not.
class Buffer {
 public:
  explicit Buffer(int64_t bytes, int64_t misalignment = 0) : size_(bytes), offset_(misalignment) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes + misalignment) != 0) std::abort();
    memory_.reset(static_cast<uint8_t*>(memory));
    memset(memory_.get(), 0xA5, bytes + misalignment);
  }
  template <class T = uint8_t>
  T* as() const {
    return reinterpret_cast<T*>(memory_.get() + offset_);
  }
  int64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory_;
  int64_t size_, offset_;
};

/// Index of the first byte that differs, -1 for none.
inline int64_t first_difference(const Buffer& a, const Buffer& b) {
  if (a.size() != b.size()) return std::min(a.size(), b.size());
  for (int64_t i = 0; i < a.size(); ++i)
    if (a.as()[i] != b.as()[i]) return i;
  return -1;
}

/// The same for elements, byte for byte but for NaN: which of two NaN operands an addition passes on is the processor's
/// choice.
inline int64_t first_difference(const void* a, const void* b, ElementType type, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t x = reference::get_bits(a, type, i), y = reference::get_bits(b, type, i);
    if (x != y && !(std::isnan(reference::number(x, type)) && std::isnan(reference::number(y, type)))) return i;
  }
  return -1;
}
inline int64_t first_difference(const Buffer& a, const Buffer& b, ElementType type) {
  return first_difference(a.as(), b.as(), type, a.size() / reference::element_size(type));
}

// --- numbers

enum class Data { kNormal, kSparse, kWide, kZero, kNaN, kInfinity, kNegativeZero, kAnyBits, kExponents };

/// Ordinary numbers; runs of 16 that are zero, negative zero or subnormal; magnitudes from 2^-120 to 2^120; one NaN or
/// infinity; nothing but negative zeros; any bits of a bfloat16; runs of 16 below any power of two, subnormal to infinite,
/// with mantissas about those from which a scale is the next power of two.
inline void fill_elements(void* x, ElementType type, int64_t first, int64_t count, Data data, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const int range = type == ElementType::kF16 ? 14 : 120;
  const int special = static_cast<int>(random() % count);
  uint32_t largest = 0;
  for (int64_t i = 0, run = 0, exponent = 0; i < count; ++i) {
    if (i % 16 == 0) {
      run = random() % 6, exponent = static_cast<int>(random() % (2 * range)) - range;
      largest = random() % 256;
    }
    float value = normal(random);
    if (data == Data::kZero) value = i % 3 ? 0.0f : -0.0f;
    if (data == Data::kNegativeZero) value = -0.0f;
    if (data == Data::kWide) value = std::ldexp(value, run == 0 ? static_cast<int>(random() % 20) - range : exponent);
    if (data == Data::kSparse) {
      if (run == 0) value = random() % 2 ? 0.0f : -0.0f;
      if (run == 1) value = Lanes<float>::from_bits((random() & 0x80000000u) | (random() & 0x007FFFFFu));
      if (run == 2) value = random() % 2 ? value : -0.0f;
      if (run == 3) value = std::ldexp(value, -126);
    }
    if (data == Data::kAnyBits) value = Lanes<float>::from_bits(random() & 0xFFFF0000u);
    if (data == Data::kExponents) {
      const uint32_t below = random() % 12;
      const uint32_t mantissa = random() % 2 ? random() % 128 : (random() % 2 ? 0x3Fu : 0x5Fu) + random() % 3;
      value = Lanes<float>::from_bits((random() & 0x80000000u) | (largest > below ? largest - below : 0u) << 23 |
                                      mantissa << 16);
    }
    if (i == special && data == Data::kNaN) value = -std::numeric_limits<float>::quiet_NaN();
    if (i == special && data == Data::kInfinity) value = -std::numeric_limits<float>::infinity();
    reference::put(x, type, first + i, value);
  }
}

constexpr ElementType kTypes[] = {ElementType::kBF16, ElementType::kF16, ElementType::kF32};

inline std::string name(ElementType type) {
  return type == ElementType::kBF16 ? "bf16" : type == ElementType::kF16 ? "f16" : "f32";
}

}  // namespace jaxlowprec
