// The epilogue of a GEMM, from scaled float32 sums to the result: + bias, activation, + accumulate, one cast (numerics.md
// 9).
#pragma once

#include "../../numerics/activations.h"
#include "../../problems.h"
#include "../elements.h"
#include "matmul_chunks.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// `count` results of one row, kLanes or, beyond the last column, fewer.
template <class E>
JLP_RULE void finish_vector(const MatmulResult& p, F32 y, int64_t batch, int64_t row, int64_t column, int count) {
  const int64_t index = (batch * p.rows + row) * p.columns + column;
  const auto store = [&](void* to) {
    if (count == kLanes)
      E::store_lanes(static_cast<typename E::Storage*>(to) + index, y);
    else
      store_elements(to, p.type, index, count, y);
  };
  if (p.bias) y += load_elements(p.bias, ElementType::kF32, batch * p.columns + column, count);
  if (p.activation == Activation::kGeluTanh) {
    if (p.pre_activation) store(p.pre_activation);
    y = gelu_tanh(y);
  }
  if (p.activation == Activation::kGeluTanhGradient)
    y *= gelu_tanh_gradient(load_elements(p.activation_input, p.activation_input_type, index, count));
  if (p.accumulate) y += load_elements(p.accumulate, p.accumulate_type, index, count);
  store(p.result);
}

/// A range of results from [rows][vectors] of sums. Not inlined: for every kind of sums it would be most of the code.
template <class E>
__attribute__((noinline)) void finish_vectors(const MatmulResult& problem, const F32* y, int64_t batch,
                                              const MatmulRange& range) {
  const MatmulResult p = problem;  // in registers: results that are stored cannot change it
  const int64_t whole = range.columns / kLanes * kLanes;
  for (int64_t row = range.first_row; row < range.first_row + range.rows; ++row) {
    for (int64_t i = 0; i < whole; i += kLanes) finish_vector<E>(p, *y++, batch, row, range.first_column + i, kLanes);
    const int rest = static_cast<int>(range.columns - whole);
    if (rest > 0) finish_vector<E>(p, *y++, batch, row, range.first_column + whole, rest);
  }
}

constexpr int64_t kMostFinished = 128;  // columns of a range

/// Fetches what a range's sums will be added to: from memory while they are computed.
JLP_RULE void fetch_accumulated(const MatmulResult& p, int64_t batch, const MatmulRange& range) {
  if (!p.accumulate) return;
  const int64_t bytes = element_bytes(p.accumulate_type);
  const auto* row = static_cast<const uint8_t*>(p.accumulate) +
                    ((batch * p.rows + range.first_row) * p.columns + range.first_column) * bytes;
  for (int64_t r = 0; r < range.rows; ++r, row += p.columns * bytes)
    for (int64_t at = 0; at < range.columns * bytes; at += 64) __builtin_prefetch(row + at, 1);
}

/// A range of at most kMostFinished columns whose sums are sums(row, vector), both counted from the range's first. Where
/// whole vectors have to be stored, or added to float32 first, a short path does it: with a small K the full path takes as
/// long as the sums.
template <class Sums>
JLP_RULE void finish_range(const MatmulResult& p, int64_t batch, const MatmulRange& range, Sums sums) {
  const int64_t vectors = divide_up(range.columns, kLanes);
  const bool adds_float32 = p.accumulate && p.accumulate_type == ElementType::kF32;
  with_element(p.type, [&](auto element) {
    using E = decltype(element);
    const bool adds_other = p.accumulate && !adds_float32;
    if (p.bias || p.activation != Activation::kNone || adds_other || range.columns % kLanes != 0) {
      F32 y[kMostFinished / kLanes];
      const int64_t together = kMostFinished / kLanes / vectors;  // rows
      for (int64_t row = 0; row < range.rows; row += together) {
        const int64_t rows = std::min(together, range.rows - row);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t v = 0; v < vectors; ++v) y[r * vectors + v] = sums(row + r, v);
        finish_vectors<E>(p, y, batch, {range.first_row + row, rows, range.first_column, range.columns});
      }
      return;
    }
    const int64_t stride = p.columns, first = (batch * p.rows + range.first_row) * stride + range.first_column;
    auto* out = static_cast<typename E::Storage*>(p.result) + first;
    if (adds_float32) {
      const float* total = static_cast<const float*>(p.accumulate) + first;
      for (int64_t r = 0; r < range.rows; ++r, out += stride, total += stride)
        for (int64_t v = 0; v < vectors; ++v) E::store_lanes(out + v * kLanes, sums(r, v) + load<F32>(total + v * kLanes));
      return;
    }
    for (int64_t r = 0; r < range.rows; ++r, out += stride)
      for (int64_t v = 0; v < vectors; ++v) E::store_lanes(out + v * kLanes, sums(r, v));
  });
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
