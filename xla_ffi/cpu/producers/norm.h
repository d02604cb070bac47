// Norms of rows (numerics.md 12.2). A row is read two or three times, from memory once: it is fetched into the cache while
// the row before is written. With amaxes, 16 rows are then read again from there. Bytes moved: the operands once, the
// results once.
#pragma once

#include <algorithm>
#include <cmath>

#include "../quantize/gather_amaxes.h"
#include "row_sums.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int64_t kNormElements = 16 * 1024;  // of a chunk: whole rows

inline int64_t rows_of_chunk(const NormProblem& p) {
  const int64_t rows = std::max<int64_t>(1, kNormElements / p.columns);
  return p.amaxes.wanted() ? divide_up(rows, kBlock) * kBlock : rows;
}

template <class E>
struct NormKernel {
  using Storage = typename E::Storage;

  static int64_t chunks_per_matrix(const NormProblem& p) { return divide_up(p.rows, rows_of_chunk(p)); }

  static void chunk(const NormProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * rows_of_chunk(p), last = std::min(first + rows_of_chunk(p), p.rows);
    GatheredAmaxes<E> amaxes(p.amaxes);
    for (int64_t r = first; r < last; ++r) {
      if (p.kind == NormKind::kLayer) {
        row<true>(p, batch, batch * p.rows + r);
      } else {
        row<false>(p, batch, batch * p.rows + r);
      }
      if (p.amaxes.wanted() && (r + 1 == last || (r + 1) % kBlock == 0)) add_band(p, batch, r / kBlock * kBlock, amaxes);
    }
    if (p.amaxes.wanted()) amaxes.raise(batch);
  }

 private:
  template <bool kLayer>
  static void row(const NormProblem& p, int64_t batch, int64_t line) {
    const int64_t columns = p.columns, index = line * columns;
    const float *weight = p.weight + batch * columns, *beta = p.beta ? p.beta + batch * columns : nullptr;
    const float each = static_cast<float>(1.0 / columns);
    const Storage* x = from<E>(p.x, index);
    if (p.residual) x = total(p, index);
    float mean = 0.0f;
    if (kLayer) p.mean[line] = mean = sum_of_row<E>(columns, p.type, [&](auto at) { return widened(at, x); }) * each;
    const auto centered = [&](auto at) { return kLayer ? widened(at, x) - mean : widened(at, x); };
    const float square = sum_of_row<E>(columns, p.type,
                                       [&](auto at) {
                                         const F32 v = centered(at);
                                         return at.only(v * v);
                                       }) *
                         each;
    const float inverse = 1.0f / std::sqrt(square + p.epsilon);
    p.inverse[line] = inverse;
    Storage* y = from<E>(p.result, index);
    const Storage* next = from<E>(p.x, index + columns);
    along_run<E>(columns, p.type, [&](auto at) {
      __builtin_prefetch(next + at.k);  // of the next row: its sum would wait for it
      const F32 v = (centered(at) * inverse) * at.load_floats(weight);
      at.store(y, kLayer && beta ? v + at.load_floats(beta) : v);
    });
  }

  /// x + residual, rounded to the element type, at p.total.
  static const Storage* total(const NormProblem& p, int64_t index) {
    const Storage *x = from<E>(p.x, index), *residual = from<E>(p.residual, index);
    Storage* sum = from<E>(p.total, index);
    along_run<E>(p.columns, p.type, [&](auto at) { at.store(sum, widened(at, x) + at.load(residual)); });
    return sum;
  }

  template <class Place>
  JLP_RULE F32 widened(Place at, const Storage* x) {
    return L::flush(at.load(x));
  }

  /// The amaxes of the rows from `row` on, up to kBlock of them, which were just written.
  static void add_band(const NormProblem& p, int64_t batch, int64_t row, GatheredAmaxes<E>& amaxes) {
    const Storage* y = from<E>(p.result, batch * p.rows * p.columns);
    for (int64_t column = 0; column < p.columns; column += kPacket)
      amaxes.add(CachedSlab<E>(y, p.rows, p.columns, row, column));
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
