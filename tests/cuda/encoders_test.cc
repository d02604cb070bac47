// The encoders of quantize_codes.cuh against the rules of numerics/: all finite 16-bit elements by many factors, and
// float32 elements of every exponent around the codes and their ties.
#include "encoders.h"

#include "../cpp/check.h"
#include "../cpp/quantize_reference.h"
#include "device_copies.h"

namespace jaxlowprec {
namespace {

constexpr CodeType kCodes[] = {CodeType::kE2M1, CodeType::kE4M3, CodeType::kE5M2};

/// Negative numbers too, and 16 together, in an order that puts large and small ones together.
Buffer all_of(uint32_t infinity) {
  const int64_t count = 0x10000;
  Buffer x(count * 2);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = i * 40503u & 0xFFFFu;  // every one once
    x.as<uint16_t>()[i] = static_cast<uint16_t>((bits & 0x7FFFu) < infinity ? bits : bits & 0x8000u);
  }
  return x;
}

/// Numbers around every halfway point between codes, of float32's own precision, and of every exponent.
Buffer float32_elements(std::mt19937& random) {
  const int64_t count = 1 << 16;
  Buffer x(count * 4);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t exponent = random() % 255, top = random() % 64 << 17, sign = random() & kSignBit;
    const uint32_t near = (random() % 5 - 2) & 0x007FFFFFu, any = random() & 0x1FFFFu;
    const uint32_t mantissa = (top + (i % 2 ? near : any)) & 0x007FFFFFu;
    x.as<uint32_t>()[i] = sign | (i % 4 ? 118 + exponent % 20 : exponent) << 23 | mantissa;
  }
  return x;
}

void check_codes(const Buffer& x, ElementType type, CodeType code, float factor, bool stochastic, uint32_t random_word) {
  const int64_t count = x.size() / reference::element_size(type);
  const bool packed = code == CodeType::kE2M1;
  const DeviceBytes elements(x, 0, "x"), codes(packed ? count / 2 : count, 0, "codes");
  cuda_on_cpu::options().order = cuda_on_cpu::Order::kForward;
  CHECK_EQ(cuda::encode({elements.as(), type, count, code, factor, stochastic, random_word, codes.as()}), cudaSuccess);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t byte = random_word >> (8 * (i % 4)) & 0xFFu;
    const float number = reference::get(x.as(), type, i);
    const uint32_t expected = reference::code_of(code, number, factor, stochastic ? &byte : nullptr);
    CHECK_EQ(packed ? reference::code_at(codes.as(), i) : codes.as()[i], expected);
  }
}

void check_all(const Buffer& x, ElementType type, std::mt19937& random) {
  for (const CodeType code : kCodes)
    for (int i = 0; i < 8; ++i) {
      // Powers of two, other numbers, and what overflows and underflows.
      float factor = std::ldexp(i % 2 ? 1.0f : 1.0f + static_cast<float>(random() % 8388608) / 8388608.0f, i % 4 * 3 - 4);
      if (i == 6) factor = kMaxFinite;
      if (i == 7) factor = std::ldexp(1.0f, -126);
      const check::Given given(name(type) + " code type " + std::to_string(static_cast<int>(code)) + " factor " +
                               std::to_string(factor));
      check_codes(x, type, code, factor, false, 0);
      for (const uint32_t word : {0xFF00FF00u, static_cast<uint32_t>(random())})
        check_codes(x, type, code, factor, true, word);
    }
}

TEST(encoders_agree_with_the_rules_for_all_bf16) {
  std::mt19937 random(1);
  check_all(all_of(0x7F80), ElementType::kBF16, random);
}
TEST(encoders_agree_with_the_rules_for_all_f16) {
  std::mt19937 random(2);
  check_all(all_of(0x7C00), ElementType::kF16, random);
}
TEST(encoders_agree_with_the_rules_for_float32_near_the_codes) {
  std::mt19937 random(3);
  check_all(float32_elements(random), ElementType::kF32, random);
}

}  // namespace
}  // namespace jaxlowprec
