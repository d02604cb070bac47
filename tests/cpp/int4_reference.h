// Int4 one group at a time, as int4_qat.md 1.2 and 1.4 word it: IEEE divisions, no numerics/int4.h. And the cases to run it
// on.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernel_data.h"

namespace jaxlowprec {
namespace reference {

/// A matrix's codes, [batch, lines, ...] as the problems have them.
struct Int4Codes {
  std::vector<uint8_t> data;
  std::vector<uint16_t> scale;
  std::vector<uint8_t> zero;

  Int4Codes() = default;
  explicit Int4Codes(const Int4Matrices& m)
      : data(m.batch * m.lines() * m.line_bytes()),
        scale(m.batch * m.lines() * m.groups()),
        zero(m.format.symmetric ? 0 : scale.size()) {}
};

inline float deployed(float x, ElementType type) { return number(rounded_bits(x, type), type); }

inline int64_t int4_index(const Int4Matrices& m, int64_t batch, int64_t line, int64_t k) {
  return batch * m.size() + (m.columnwise ? k * m.columns + line : line * m.columns + k);
}

/// Codes, unsigned, of one group; its scale and zero point.
inline std::vector<int> int4_group(const std::vector<float>& x, const Int4Format& f, float& scale, int& zero) {
  float low = 0, high = 0;
  bool finite = true;
  for (const float v : x) low = std::min(low, v), high = std::max(high, v), finite = finite && std::isfinite(v);
  const float step = f.symmetric ? std::max(-low, high) / 7.0f : (high - low) / 15.0f;
  scale = deployed(std::max(step, 1e-5f), f.scale);
  if (!finite || !std::isfinite(scale)) {
    scale = std::nanf(""), zero = f.symmetric ? 8 : 0;
    return std::vector<int>(x.size(), zero);
  }
  zero = f.symmetric ? 8 : std::clamp(-static_cast<int>(std::nearbyint(low / scale)), 0, 15);
  std::vector<int> codes;
  for (const float v : x)
    codes.push_back(std::clamp(static_cast<int>(std::nearbyint(v / scale)) + zero, f.symmetric ? 1 : 0, 15));
  return codes;
}

inline Int4Codes quantize(const Int4Matrices& m, const void* x, ElementType type) {
  Int4Codes codes(m);
  const int64_t size = m.format.group;
  for (int64_t batch = 0; batch < m.batch; ++batch)
    for (int64_t line = 0; line < m.lines(); ++line) {
      const int64_t at = batch * m.lines() + line;
      uint8_t* data = codes.data.data() + at * m.line_bytes();
      const auto put_code = [&](int64_t k, int code) {
        data[k / 2] = static_cast<uint8_t>(data[k / 2] | code << (k % 2 * 4));
      };
      int zero = 0;
      for (int64_t g = 0; g < m.groups(); ++g) {
        std::vector<float> values(size);
        for (int64_t i = 0; i < size && g * size + i < m.length(); ++i)
          values[i] = L::flush(deployed(get(x, type, int4_index(m, batch, line, g * size + i)), m.format.scale));
        float scale;
        const std::vector<int> group = int4_group(values, m.format, scale, zero);
        for (int64_t i = 0; i < size; ++i) put_code(g * size + i, group[i]);
        codes.scale[at * m.groups() + g] = std::isnan(scale) ? (m.format.scale == ElementType::kF16 ? 0x7E00 : 0x7FC0)
                                                             : static_cast<uint16_t>(rounded_bits(scale, m.format.scale));
        if (!m.format.symmetric) codes.zero[at * m.groups() + g] = static_cast<uint8_t>(zero);
      }
      if (m.groups() * size % 2) put_code(m.groups() * size, zero);
    }
  return codes;
}

inline std::vector<uint8_t> dequantize(const Int4Matrices& m, const Int4Codes& codes, ElementType type) {
  std::vector<uint8_t> result(m.batch * m.size() * element_size(type));
  for (int64_t batch = 0; batch < m.batch; ++batch)
    for (int64_t line = 0; line < m.lines(); ++line)
      for (int64_t k = 0; k < m.length(); ++k) {
        const int64_t at = batch * m.lines() + line, group = at * m.groups() + k / m.format.group;
        const float scale = L::flush(number(codes.scale[group], m.format.scale));
        const int zero = m.format.symmetric ? 8 : codes.zero[group];
        const int steps = static_cast<int>(code_at(codes.data.data() + at * m.line_bytes(), k)) - zero;
        const float value = deployed(static_cast<float>(steps) * scale, m.format.scale);
        put(result.data(), type, int4_index(m, batch, line, k), std::isfinite(scale) ? value : std::nanf(""));
      }
  return result;
}

}  // namespace reference

// --- cases

constexpr ElementType kInt4Types[] = {ElementType::kBF16, ElementType::kF16, ElementType::kF32};

struct Int4Shape {
  int64_t batch, rows, columns, group;
};
/// Whole groups of the usual sizes, ragged lines, groups of odd size, one of one element, groups longer than a line.
constexpr Int4Shape kInt4Shapes[] = {{1, 3, 256, 128}, {2, 128, 72, 32},  {1, 256, 200, 128}, {1, 160, 136, 32},
                                     {1, 64, 64, 64},  {1, 7, 45, 5},     {2, 5, 33, 1},      {1, 33, 13, 7},
                                     {1, 130, 70, 48}, {1, 40, 100, 300}, {3, 1, 24, 8},      {1, 96, 96, 96}};

inline std::string name(const Int4Matrices& m) {
  return std::to_string(m.batch) + "x" + std::to_string(m.rows) + "x" + std::to_string(m.columns) + " group " +
         std::to_string(m.format.group) + (m.format.symmetric ? "" : " asymmetric") +
         (m.format.scale == ElementType::kF16 ? " f16" : " bf16") + (m.columnwise ? " columns" : " rows");
}

/// Calls visit(matrices) for all shapes, deployment dtypes, symmetric and not, rows and columns.
template <class Visit>
void for_int4_matrices(Visit visit) {
  for (const Int4Shape& s : kInt4Shapes)
    for (const ElementType deploy : {ElementType::kBF16, ElementType::kF16})
      for (const bool symmetric : {true, false})
        for (const bool columnwise : {false, true})
          visit(Int4Matrices{s.batch, s.rows, s.columns, columnwise, {s.group, symmetric, deploy}});
}

inline bool fake_quantize_serves(const Int4Matrices& m, ElementType type) {
  return type == ElementType::kF32 || type == m.format.scale;
}

/// Codes as a checkpoint may hold them: any byte, scales of any bits, zero points up to 15.
inline reference::Int4Codes any_int4_codes(const Int4Matrices& m, uint32_t seed) {
  std::mt19937 random(seed);
  reference::Int4Codes codes(m);
  for (uint8_t& byte : codes.data) byte = static_cast<uint8_t>(random());
  for (uint16_t& scale : codes.scale) scale = static_cast<uint16_t>(random());
  for (uint8_t& zero : codes.zero) zero = random() % 16;
  return codes;
}

}  // namespace jaxlowprec
