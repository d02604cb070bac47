// What happens to a GEMM's float32 sums once their scales are in: + bias, activation, + accumulate, one cast (numerics.md
// 9).
#pragma once

#include "../numerics/gelu.h"
#include "../problems.h"
#include "elements.h"
#include "matmul_chunks.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// kLanes results of one row, those beyond the last column left out.
JLP_RULE void finish_vector(const MatmulResult& p, F32 y, int64_t batch, int64_t row, int64_t column) {
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

/// A range of results whose sums are sums(row, vector), both counted from the range's first. Where there is nothing to do
/// but to store whole vectors, little else is done: with a small K it would take as long as the sums.
template <class Sums>
JLP_RULE void finish_range(const MatmulResult& p, int64_t batch, const MatmulRange& range, Sums sums) {
  const int64_t vectors = divide_up(range.columns, kLanes);
  if (p.bias || p.activation != Activation::kNone || p.accumulate || range.columns % kLanes != 0) {
    for (int64_t r = 0; r < range.rows; ++r)
      for (int64_t v = 0; v < vectors; ++v)
        finish_vector(p, sums(r, v), batch, range.first_row + r, range.first_column + v * kLanes);
    return;
  }
  with_element(p.type, [&](auto element) {
    using E = decltype(element);
    const int64_t stride = p.columns;
    auto* out =
        static_cast<typename E::Storage*>(p.result) + (batch * p.rows + range.first_row) * stride + range.first_column;
    for (int64_t r = 0; r < range.rows; ++r, out += stride)
      for (int64_t v = 0; v < vectors; ++v) E::store_lanes(out + v * kLanes, sums(r, v));
  });
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
