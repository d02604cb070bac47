// Norms of rows and their gradients (numerics.md 12.2). A row is widened once, into memory that stays in the cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "../quantize/gather_amaxes.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The sum of a row: 256 sums by place, added up by halves. value(k): kLanes elements from k on, of `columns` in all; lanes
/// beyond are zero.
template <class Value>
JLP_RULE float sum_of_row(int64_t columns, Value value) {
  constexpr int kPlaces = 256, kVectors = kPlaces / kLanes;
  F32 sums[kVectors];
  for (int j = 0; j < kVectors; ++j) sums[j] = j * kLanes < columns ? value(j * kLanes) + 0.0f : F32{};  // -0 becomes 0
  for (int64_t first = kPlaces; first < columns; first += kPlaces)
    for (int j = 0; j < kVectors; ++j) sums[j] += first + j * kLanes < columns ? value(first + j * kLanes) : F32{};
  for (int half = kVectors / 2; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  alignas(64) float lanes[kLanes];
  store(lanes, sums[0]);
  for (int half = kLanes / 2; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
  return lanes[0];
}

/// Widens a row into `to`, which has room for whole vectors: zeros behind it.
template <class E>
void widen_row(const void* x, ElementType type, int64_t index, int64_t columns, float* to) {
  const auto* row = static_cast<const typename E::Storage*>(x) + index;
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) store(to + k, Lanes<F32>::flush(E::load_lanes(row + k)));
  if (k < columns) store(to + k, Lanes<F32>::flush(load_elements(x, type, index + k, static_cast<int>(columns - k))));
}

/// Narrows a row.
template <class E>
void narrow_row(void* y, ElementType type, int64_t index, int64_t columns, const float* from) {
  auto* row = static_cast<typename E::Storage*>(y) + index;
  int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) E::store_lanes(row + k, load<F32>(from + k));
  if (k < columns) store_elements(y, type, index + k, static_cast<int>(columns - k), load<F32>(from + k));
}

constexpr int64_t kNormElements = 16 * 1024;  // of a chunk: whole rows

template <class Problem>
int64_t rows_of_chunk(const Problem& p) {
  return std::max<int64_t>(1, kNormElements / p.columns);
}
inline int64_t rows_of_chunk(const NormProblem& p) {
  const int64_t rows = std::max<int64_t>(1, kNormElements / p.columns);
  return p.amaxes.wanted() ? divide_up(rows, kBlock) * kBlock : rows;
}

template <class Problem>
int64_t chunks_of_rows(const Problem& p) {
  return (p.rows + rows_of_chunk(p) - 1) / rows_of_chunk(p);
}

inline int64_t padded(int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

template <class E>
struct NormKernel {
  static int64_t chunks_per_matrix(const NormProblem& p) { return chunks_of_rows(p); }

  static void chunk(const NormProblem& p, int64_t batch, int64_t chunk) {
    const int64_t columns = p.columns, wide = padded(columns);
    float* const row = reinterpret_cast<float*>(thread_scratch(3 * wide * sizeof(float)));
    float *const weight = row + wide, *const beta = weight + wide;
    copy(p.weight + batch * columns, columns, weight);
    if (p.beta) copy(p.beta + batch * columns, columns, beta);
    const float each = static_cast<float>(1.0 / columns);
    const int64_t first = chunk * rows_of_chunk(p), last = std::min(first + rows_of_chunk(p), p.rows);
    GatheredAmaxes<E> amaxes(p.amaxes);
    for (int64_t r = first; r < last; ++r) {
      const int64_t line = batch * p.rows + r, index = line * columns;
      widen_row<E>(p.x, p.type, index, columns, row);
      if (p.residual) add_residual(p, index, row);
      float mean = 0.0f;
      if (p.kind == NormKind::kLayer) {
        mean = sum_of_row(columns, [&](int64_t k) { return load<F32>(row + k); }) * each;
        for (int64_t k = 0; k < wide; k += kLanes) store(row + k, load<F32>(row + k) - mean);
        for (int64_t k = columns; k < wide; ++k) row[k] = 0.0f;
        p.mean[line] = mean;
      }
      const float square = sum_of_row(columns, [&](int64_t k) { return load<F32>(row + k) * load<F32>(row + k); }) * each;
      const float inverse = 1.0f / std::sqrt(square + p.epsilon);
      p.inverse[line] = inverse;
      for (int64_t k = 0; k < wide; k += kLanes) {
        F32 y = (load<F32>(row + k) * inverse) * load<F32>(weight + k);
        if (p.beta) y = y + load<F32>(beta + k);
        store(row + k, y);
      }
      narrow_row<E>(p.result, p.type, index, columns, row);
      if (p.amaxes.wanted() && (r + 1 == last || (r + 1) % kBlock == 0)) add_band(p, batch, r / kBlock * kBlock, amaxes);
    }
    if (p.amaxes.wanted()) amaxes.raise(batch);
  }

 private:
  /// The amaxes of the rows from `row` on, up to kBlock of them, which were just written.
  static void add_band(const NormProblem& p, int64_t batch, int64_t row, GatheredAmaxes<E>& amaxes) {
    const auto* y = static_cast<const typename E::Storage*>(p.result) + batch * p.rows * p.columns;
    for (int64_t column = 0; column < p.columns; column += kPacket) amaxes.add(Slab<E>(y, p.rows, p.columns, row, column));
  }

  static void copy(const float* from, int64_t count, float* to) {
    for (int64_t k = 0; k < count; ++k) to[k] = from[k];
    for (int64_t k = count; k < padded(count); ++k) to[k] = 0.0f;
  }

  /// x + residual, rounded to the element type: to `total`, and widened again.
  static void add_residual(const NormProblem& p, int64_t index, float* row) {
    for (int64_t k = 0; k < p.columns; k += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, p.columns - k));
      const F32 sum = E::round(load<F32>(row + k) + load_elements(p.residual, p.type, index + k, count));
      store(row + k, sum);
    }
    narrow_row<E>(p.total, p.type, index, p.columns, row);
  }
};

template <class E>
struct NormGradientKernel {
  static int64_t chunks_per_matrix(const NormGradientProblem& p) { return chunks_of_rows(p); }

  static void chunk(const NormGradientProblem& p, int64_t batch, int64_t chunk) {
    const int64_t columns = p.columns, wide = padded(columns);
    float* const normed = reinterpret_cast<float*>(thread_scratch(3 * wide * sizeof(float)));
    float *const scaled = normed + wide, *const weight = scaled + wide;
    for (int64_t k = 0; k < wide; ++k) weight[k] = k < columns ? p.weight[batch * columns + k] : 0.0f;
    const float each = static_cast<float>(1.0 / columns);
    const int64_t first = chunk * rows_of_chunk(p), last = std::min(first + rows_of_chunk(p), p.rows);
    for (int64_t r = first; r < last; ++r) {
      const int64_t line = batch * p.rows + r, index = line * columns;
      const float inverse = p.inverse[line];
      widen_row<E>(p.x, p.type, index, columns, normed);
      widen_row<E>(p.dy, p.type, index, columns, scaled);
      for (int64_t k = 0; k < wide; k += kLanes) {
        F32 x = load<F32>(normed + k);
        if (p.mean) x = x - p.mean[line];
        store(normed + k, x * inverse);
        store(scaled + k, load<F32>(scaled + k) * load<F32>(weight + k));
      }
      for (int64_t k = columns; k < wide; ++k) normed[k] = 0.0f;
      const float slope =
          sum_of_row(columns, [&](int64_t k) { return load<F32>(scaled + k) * load<F32>(normed + k); }) * each;
      float mean = 0.0f;
      if (p.mean) mean = sum_of_row(columns, [&](int64_t k) { return load<F32>(scaled + k); }) * each;
      for (int64_t k = 0; k < columns; k += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, columns - k));
        F32 g = load<F32>(scaled + k);
        if (p.mean) g = g - mean;
        F32 dx = (g - load<F32>(normed + k) * slope) * inverse;
        if (p.of_total) dx = dx + load_elements(p.of_total, p.type, index + k, count);
        store(normed + k, dx);
      }
      narrow_row<E>(p.dx, p.type, index, columns, normed);
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
