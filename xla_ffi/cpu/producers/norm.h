// Norms of rows (numerics.md 12.2). A row is read two or three times, from memory once: it is fetched into the cache while
// the row before is written. With amaxes, 16 rows are then read again from there. Bytes moved: the operands once, the
// results once.
#pragma once

#include <algorithm>

#include "../quantize/gather_amaxes.h"
#include "norm_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int64_t kNormElements = 64 * 1024;  // of a chunk: whole rows

template <class E>
struct NormKernel {
  using Storage = typename E::Storage;

  static int64_t rows_of_chunk(const NormProblem& p) {
    const int64_t rows = std::max<int64_t>(1, kNormElements / p.columns);
    return p.amaxes.wanted() ? divide_up(rows, kBlock) * kBlock : rows;
  }
  static int64_t chunks_per_matrix(const NormProblem& p) { return divide_up(p.rows, rows_of_chunk(p)); }

  static void chunk(const NormProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * rows_of_chunk(p), last = std::min(first + rows_of_chunk(p), p.rows);
    const NormParameters parameters(p, batch, thread_scratch(NormParameters::bytes(p)));
    GatheredAmaxes<E> amaxes(p.amaxes);
    for (int64_t r = first; r < last; r += kBlock) {
      const int64_t rows = std::min<int64_t>(kBlock, last - r), line = batch * p.rows + r;
      Storage* y = from<E>(p.result, line * p.columns);
      for (int64_t i = 0; i < rows; ++i) {
        Storage* to = y + i * p.columns;
        p.kind == NormKind::kLayer ? row<true>(p, parameters, line + i, to) : row<false>(p, parameters, line + i, to);
      }
      for (int64_t column = 0; p.amaxes.wanted() && column < p.columns; column += kPacket)
        amaxes.add(CachedSlab<E>(y, rows, p.columns, 0, column));
    }
    if (p.amaxes.wanted()) amaxes.raise(batch);
  }

 private:
  template <bool kLayer>
  static void row(const NormProblem& p, const NormParameters& parameters, int64_t line, Storage* y) {
    const auto row = NormedRow<E, kLayer>::template found<false>(p, line);
    const Storage* next = from<E>(p.x, (line + 1) * p.columns);  // its sum would wait for it
    row.write(parameters, 0, p.columns, y, [&](int64_t k) { __builtin_prefetch(next + k); });
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
