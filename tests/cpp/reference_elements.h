// Arithmetic and elements of the scalar references. The processor keeps subnormal numbers here, so they are flushed by hand.
#pragma once

#include <cmath>
#include <cstring>

#include "../../xla_ffi/numerics/float16.h"
#include "../../xla_ffi/numerics/float8.h"
#include "../../xla_ffi/problems.h"

namespace jaxlowprec {
namespace reference {

using L = Lanes<float>;

inline float add(float a, float b) { return L::flush(L::flush(a) + L::flush(b)); }
/// A product is zero where, rounded to 24 bits, it is below the smallest normal number: so flush x86's processors. Rounded
/// to subnormal numbers first, 2^-126 - 2^-150 would be normal.
inline float multiply(float a, float b) {
  const double exact = static_cast<double>(L::flush(a)) * L::flush(b);
  return std::fabs(exact) < 0x1.ffffffp-127 ? std::copysign(0.0f, static_cast<float>(exact)) : static_cast<float>(exact);
}
inline float fused_multiply_add(float a, float b, float c) {
  return L::flush(std::fma(L::flush(a), L::flush(b), L::flush(c)));
}

// --- codes

/// The number of an 8-bit code.
inline float float8_number(CodeType type, uint32_t code) {
  return with_float8(type, [&](auto element) { return float8_decode<decltype(element), float>(code); });
}

// --- elements

inline int64_t element_size(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

/// The bits of element i.
inline uint32_t get_bits(const void* x, ElementType type, int64_t i) {
  uint32_t bits = 0;  // little-endian, as every supported processor
  memcpy(&bits, static_cast<const uint8_t*>(x) + i * element_size(type), element_size(type));
  return bits;
}

inline float number(uint32_t bits, ElementType type) {
  if (type == ElementType::kF32) return L::from_bits(bits);
  return type == ElementType::kBF16 ? bf16_decode<float>(bits) : f16_decode<float>(bits);
}

inline uint32_t rounded_bits(float value, ElementType type) {
  if (type == ElementType::kF32) return L::bits(value);
  return type == ElementType::kBF16 ? bf16_encode(value) : f16_encode(value);
}

inline float get(const void* x, ElementType type, int64_t i) { return L::flush(number(get_bits(x, type, i), type)); }

inline void put(void* x, ElementType type, int64_t i, float value) {
  const uint32_t bits = rounded_bits(value, type);
  memcpy(static_cast<uint8_t*>(x) + i * element_size(type), &bits, element_size(type));
}

/// A packed 4-bit code.
inline uint32_t code_at(const uint8_t* data, int64_t element) { return (data[element / 2] >> (element % 2 * 4)) & 15u; }

}  // namespace reference
}  // namespace jaxlowprec
