// AdamW's and Lion's update by its definition (numerics.md 19): one element after another, codes by values instead of bits.
// Shared by the tests of the CPU's kernels and of the GPU's.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../xla_ffi/numerics/optimizer_states.h"
#include "../../xla_ffi/numerics/philox.h"
#include "reference_elements.h"

namespace jaxlowprec {
namespace reference {

constexpr int kNotDrawn = -1;

/// Rounded to float32; zero where that has fewer than 24 bits. A quotient or root may be rounded to float64 before.
inline float rounded(double x) { return std::fabs(x) < 0x1.ffffffp-127 ? std::copysign(0.0f, x) : static_cast<float>(x); }
inline float divide(float a, float b) { return rounded(static_cast<double>(L::flush(a)) / L::flush(b)); }

inline float one_nan(float x) { return std::isnan(x) ? L::from_bits(kNaNBits) : x; }

/// The draw of an element.
inline int draw(const OptimizerUpdateProblem& p, int64_t batch, int which, int64_t row, int64_t column) {
  uint32_t counter[4] = {p.block_numbers[column / 32] * 4 + static_cast<uint32_t>(column % 32 / 8), p.row_numbers[row], 13,
                         0};
  const uint32_t* words = p.words + 4 * batch + 2 * which;
  philox4x32_10<float>(counter, words[0], words[1]);
  return static_cast<int>(counter[column % 8 / 2] >> (16 * (column % 2)) & 0xFFFF);
}

/// The number of eighths of a binade that |x| has from 2^-127 on, rounded.
inline int state_rank(float x, bool is_signed, int drawn) {
  const double size = std::fabs(L::flush(x));
  if (!std::isfinite(x) || (!is_signed && L::flush(x) < 0)) return 2040;
  if (size == 0) return 0;
  const int exponent = std::ilogb(size);
  const double added = drawn == kNotDrawn ? 0.5 : (16.0 * drawn + 8) / (1 << 20);
  const int eighths = static_cast<int>(std::floor(std::ldexp(size, 3 - exponent) + added));
  return std::min(8 * (exponent + 127) + eighths - 8, 2039);
}

inline float decode_state(uint8_t code, uint8_t exponent, bool is_signed) {
  const int magnitude = is_signed ? code % 128 : code, top = is_signed ? 127 : 255;
  if (exponent == 255) return L::from_bits(kNaNBits);
  const int rank = std::max(magnitude + 8 * exponent + 7 - top, 8);
  const double size = magnitude == 0 ? 0 : std::ldexp(1 + rank % 8 / 8.0, rank / 8 - 127);
  return static_cast<float>(is_signed && code >= 128 ? -size : size);
}

/// A row's codes and exponents.
inline void encode_row(const std::vector<float>& x, const std::vector<int>& drawn, bool is_signed, uint8_t* codes,
                       uint8_t* exponents) {
  for (size_t first = 0; first < x.size(); first += 32) {
    const size_t last = std::min(first + 32, x.size());
    int most = 0;
    for (size_t i = first; i < last; ++i) most = std::max(most, state_rank(x[i], is_signed, drawn[i]));
    const int exponent = most / 8, top = is_signed ? 127 : 255;
    exponents[first / 32] = static_cast<uint8_t>(exponent);
    for (size_t i = first; i < last; ++i) {
      const int rank = state_rank(x[i], is_signed, drawn[i]);
      int code = rank == 0 ? 0 : std::max(rank - (8 * exponent + 7) + top, is_signed ? 0 : 1);
      if (is_signed && code != 0 && x[i] < 0) code += 128;
      codes[i] = static_cast<uint8_t>(code);
    }
  }
}

inline float old_weight(const OptimizerUpdateProblem& p, int64_t i) {
  if (p.weight == WeightKind::kFloat32) return static_cast<const float*>(p.p)[i];
  const uint32_t upper = uint32_t{static_cast<const uint16_t*>(p.p)[i]} << 16;
  if (p.weight == WeightKind::kRest16) return L::from_bits(upper + static_cast<const int16_t*>(p.rest)[i]);
  if (p.weight == WeightKind::kRest8) return L::from_bits(upper + static_cast<const int8_t*>(p.rest)[i] * 256);
  return L::from_bits(upper);
}

/// Stores a weight, and what is left of it; `old` is the parameter's own number.
inline void put_weight(const OptimizerUpdateProblem& p, int64_t i, float weight, float change, float old, int drawn) {
  if (p.weight == WeightKind::kFloat32) {
    (p.update ? p.update : static_cast<float*>(p.new_p))[i] = one_nan(p.update ? change : weight);
    return;
  }
  const int64_t b = L::bits(one_nan(weight));
  const bool finite = std::isfinite(weight);
  int64_t upper = 0;
  if (p.weight == WeightKind::kDrawn) upper = (b + (finite ? drawn : 0)) / 65536;
  if (p.weight == WeightKind::kNearest) upper = std::isnan(weight) ? b / 65536 : (b + 0x7FFF + b / 65536 % 2) / 65536;
  if (p.weight == WeightKind::kRest16) {
    upper = (b + 0x8000) / 65536;
    static_cast<int16_t*>(p.new_rest)[i] = static_cast<int16_t>(b - upper * 65536);
  }
  if (p.weight == WeightKind::kRest8) {
    const int64_t near = finite ? (b + 128) / 256 * 256 : b;
    upper = (near + 0x8000) / 65536;
    static_cast<int8_t*>(p.new_rest)[i] = static_cast<int8_t>((near - upper * 65536) / 256);
  }
  if (p.update)
    p.update[i] = one_nan(add(L::from_bits(static_cast<uint32_t>(upper) << 16), -old));
  else
    static_cast<uint16_t*>(p.new_p)[i] = static_cast<uint16_t>(upper);
}

/// All of a problem; results may take the place of operands.
inline void optimizer_update(const OptimizerUpdateProblem& p) {
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const bool is_lion = p.rule == UpdateRule::kLion;
    AdamW::Scalars s{};
    Lion::Scalars of_lion{};
    if (is_lion) {
      memcpy(&of_lion, p.scalars + 6 * batch, sizeof of_lion);
      s = {of_lion.b1, of_lion.c1, of_lion.b2, of_lion.c2, 0, 0, 0, of_lion.weight_decay, of_lion.minus_rate};
    } else {
      memcpy(&s, p.scalars + 9 * batch, sizeof s);
    }
    const int kept = is_lion ? 1 : 2;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t line = batch * p.rows + row;
      std::vector<float> moments[2] = {std::vector<float>(p.columns), std::vector<float>(p.columns)};
      std::vector<int> drawn[3];
      const bool draws[3] = {p.mu.stochastic, p.nu.stochastic, p.weight == WeightKind::kDrawn};
      for (int k = 0; k < 3; ++k) {
        drawn[k].assign(p.columns, kNotDrawn);
        for (int64_t c = 0; draws[k] && c < p.columns; ++c) drawn[k][c] = draw(p, batch, k / 2, row, c);
      }
      for (int64_t c = 0; c < p.columns; ++c) {
        const int64_t i = line * p.columns + c, block = line * p.blocks() + c / 32;
        float old[2] = {};
        for (int k = 0; k < kept; ++k) {
          const MomentState& m = k == 0 ? p.mu : p.nu;
          old[k] = m.codes ? decode_state(m.codes[i], m.exponents[block], k == 0) : m.numbers[i];
        }
        const float g = get(p.g, p.g_type, i), w = old_weight(p, i);
        const float first = add(multiply(s.c1, g), multiply(s.b1, old[0]));
        float m, v = 0, u;
        if (is_lion) {
          m = add(multiply(s.c2, g), multiply(s.b2, old[0]));
          u = first > 0 ? 1.0f : first < 0 ? -1.0f : first;
        } else {
          m = first, v = add(multiply(s.c2, multiply(g, g)), multiply(s.b2, old[1]));
          const float root = rounded(std::sqrt(static_cast<double>(divide(v, s.k2))));
          u = divide(divide(m, s.k1), add(root, s.epsilon));
        }
        const float change = multiply(s.minus_rate, add(u, multiply(s.weight_decay, w)));
        const float parameter = p.weight == WeightKind::kFloat32 ? w : get(p.p, ElementType::kBF16, i);
        put_weight(p, i, add(w, change), change, parameter, drawn[2][c]);
        moments[0][c] = m, moments[1][c] = v;
      }
      for (int k = 0; k < kept; ++k) {
        const MomentState& m = k == 0 ? p.mu : p.nu;
        if (m.codes)
          encode_row(moments[k], drawn[k], k == 0, m.new_codes + line * p.columns, m.new_exponents + line * p.blocks());
        for (int64_t c = 0; !m.codes && c < p.columns; ++c) m.new_numbers[line * p.columns + c] = one_nan(moments[k][c]);
      }
    }
  }
}

}  // namespace reference
}  // namespace jaxlowprec
