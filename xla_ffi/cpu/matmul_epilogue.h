// What happens to a GEMM's float32 sums once their scales are in: + bias, activation, + accumulate, one cast (numerics.md
// 9).
#pragma once

#include "../numerics/gelu.h"
#include "elements.h"
#include "kernels.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// kLanes results of one row, those beyond the last column left out.
JLP_RULE void finish_vector(const MatmulProblem& p, F32 y, int64_t batch, int64_t row, int64_t column) {
  const int count = static_cast<int>(std::min<int64_t>(kLanes, p.columns - column));
  const int64_t index = (batch * p.rows + row) * p.columns + column;
  if (p.bias) y += load_elements(p.bias, ElementType::kF32, batch * p.columns + column, count);
  if (p.activation == Activation::kGeluTanh) {
    if (p.pre_activation) store_elements(p.pre_activation, p.type, index, count, y);
    y = gelu_tanh(y);
  }
  if (p.activation == Activation::kGeluTanhGradient)
    y *= gelu_tanh_gradient(load_elements(p.activation_input, p.activation_input_type, index, count));
  if (p.accumulate) y += load_elements(p.accumulate, p.accumulate_type, index, count);
  store_elements(p.result, p.type, index, count, y);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
