// The GEMM of kernels.h one element at a time, as numerics.md 9 words it, on top of the scalar rules of xla_ffi/numerics.
#pragma once

#include <algorithm>
#include <vector>

#include "../../xla_ffi/numerics/activations.h"
#include "../../xla_ffi/numerics/nvfp4.h"
#include "reference_elements.h"

namespace jaxlowprec {
namespace reference {

/// Element k of a row.
inline float decoded_code(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t row, int64_t k) {
  const uint8_t* data = operand.data + (batch * rows + row) * operand.format.row_bytes(operand.columns);
  if (operand.format.code == CodeType::kE2M1) return e2m1_decode<float>(code_at(data, k));
  if (operand.format.code == CodeType::kInt4) return static_cast<float>(code_at(data, k)) - 8;
  if (operand.format.code == CodeType::kInt8) return static_cast<int8_t>(data[k]);
  return float8_number(operand.format.code, data[k]);
}

inline float decoded_scale(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t row, int64_t block) {
  const Format& format = operand.format;
  const int64_t at = format.scaling == Scaling::kTensor ? 0 : (format.tiles ? row / format.block : row);
  const int64_t index = (batch * format.scale_rows(rows) + at) * format.scale_columns(operand.columns) + block;
  if (format.scaling == Scaling::kTwoLevel) return float8_decode<E4M3, float>(operand.scale[index]);
  if (format.scaling == Scaling::kE8M0) return e8m0_decode<float>(operand.scale[index]);
  if (format.scaling == Scaling::kRows || format.scaling == Scaling::kFloat16)
    return get(operand.scale, format.scale_type, index);
  float scale;
  memcpy(&scale, operand.scale + 4 * index, 4);
  return scale;
}

/// One operand of one batch entry.
struct DecodedOperand {
  int64_t depth, blocks;
  std::vector<float> codes, scales;  // [rows, depth], [rows, blocks]

  DecodedOperand(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t depth)
      : depth(depth), blocks(operand.format.scale_columns(operand.columns)) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < depth; ++k) codes.push_back(decoded_code(operand, rows, batch, row, k));
      for (int64_t b = 0; b < blocks; ++b) scales.push_back(decoded_scale(operand, rows, batch, row, b));
    }
  }
};

/// One sum, the block scales included.
inline float scaled_dot(const MatmulProblem& p, const DecodedOperand& a, int64_t m, const DecodedOperand& b, int64_t n) {
  const Scaling scaling = p.a.format.scaling;
  if (p.a.format.code == CodeType::kInt8 && p.b.format.packed()) {
    float y = 0;
    for (int64_t first = 0, group = 0; first < a.depth; first += p.b.format.block, ++group) {
      double sum = 0;  // exact
      for (int64_t k = first; k < std::min(first + p.b.format.block, a.depth); ++k)
        sum += a.codes[m * a.depth + k] * b.codes[n * b.depth + k];
      y = fused_multiply_add(static_cast<float>(sum), b.scales[n * b.blocks + group], y);
    }
    return multiply(y, a.scales[m]);
  }
  if (p.a.format.code == CodeType::kInt8) {
    int64_t sum = 0;
    for (int64_t k = 0; k < a.depth; ++k)
      sum += static_cast<int64_t>(a.codes[m * a.depth + k]) * static_cast<int64_t>(b.codes[n * b.depth + k]);
    return multiply(multiply(static_cast<float>(sum), b.scales[n]), a.scales[m]);
  }
  const int64_t size = scaling == Scaling::kTensor || scaling == Scaling::kRows ? a.depth : p.a.format.block;
  const bool packed = p.a.format.code == CodeType::kE2M1 && p.b.format.code == CodeType::kE2M1;
  float y = 0;
  for (int64_t first = 0, block = 0; first < a.depth; first += size, ++block) {
    const float a_scale = a.scales[m * a.blocks + block];
    float sum = 0;
    if (scaling == Scaling::kFloat32 && p.b.format.scaling == Scaling::kE8M0) {
      for (int64_t k = first; k < std::min(first + size, a.depth); ++k) {
        const float b_number = multiply(b.codes[n * b.depth + k], b.scales[n * b.blocks + k / p.b.format.block]);
        sum = fused_multiply_add(a.codes[m * a.depth + k], b_number, sum);
      }
      y = add(y, multiply(sum, a_scale));
      continue;
    }
    const float b_scale = b.scales[n * b.blocks + block];
    for (int64_t k = first; k < std::min(first + size, a.depth); ++k)
      sum = std::fma(a.codes[m * a.depth + k], b.codes[n * b.depth + k], sum);
    if (scaling == Scaling::kTwoLevel)
      y = add(y, multiply(sum, multiply(a_scale, b_scale)));
    else if (scaling == Scaling::kTensor)
      y = multiply(multiply(sum, a_scale), b_scale);
    else if (scaling == Scaling::kRows)
      y = multiply(multiply(sum, b_scale), a_scale);
    else if (packed)
      y = add(y, multiply(multiply(sum, a_scale), b_scale));
    else if (scaling == Scaling::kE8M0)
      for (int64_t k = first; k < std::min(first + size, a.depth); ++k)
        y = fused_multiply_add(multiply(a.codes[m * a.depth + k], a_scale), multiply(b.codes[n * b.depth + k], b_scale), y);
    else
      y = fused_multiply_add(multiply(sum, a_scale), b_scale, y);
  }
  return y;
}

inline void matmul(const MatmulProblem& p, void* result, void* pre_activation) {
  const int64_t depth = p.depth();
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const DecodedOperand a(p.a, p.rows, batch, depth), b(p.b, p.columns, batch, depth);
    const bool two_level = p.a.format.scaling == Scaling::kTwoLevel;
    const float unit = static_cast<float>(1.0 / 7225344);
    const float alpha = two_level ? multiply(multiply(p.a.amax[batch], p.b.amax[batch]), unit) : 1;
    for (int64_t m = 0; m < p.rows; ++m)
      for (int64_t n = 0; n < p.columns; ++n) {
        const int64_t index = (batch * p.rows + m) * p.columns + n;
        float y = multiply(scaled_dot(p, a, m, b, n), alpha);
        if (p.bias) y = add(y, p.bias[batch * p.columns + n]);
        if (p.activation == Activation::kGeluTanh) {
          if (pre_activation) put(pre_activation, p.type, index, y);
          y = L::flush(gelu_tanh(y));
        }
        if (p.activation == Activation::kGeluTanhGradient)
          y = multiply(y, gelu_tanh_gradient(get(p.activation_input, p.activation_input_type, index)));
        if (p.accumulate) y = add(y, get(p.accumulate, p.accumulate_type, index));
        put(result, p.type, index, y);
      }
  }
}

}  // namespace reference
}  // namespace jaxlowprec
