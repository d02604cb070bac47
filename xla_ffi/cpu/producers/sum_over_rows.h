// Sums over rows in the order of numerics.md 12.3, and the sums of parts of the rows, added up.
//
// A chunk is a part of the rows, of some columns: its sums are added to sixteen rows at a time, in vectors.
// Bytes moved per element: what it has, and 1/16 for the sums of parts.
#pragma once

#include <algorithm>

#include "../tiles.h"
#include "runs.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Adds the sum of the first of kBlock rows that are there to their columns' sums.
template <class E>
void add_sixteen(const typename E::Storage* x, int64_t rows, int64_t stride, int64_t columns, ElementType type,
                 float* sums) {
  const int64_t count = std::min<int64_t>(rows, kBlock);
  along_run<E>(columns, type, [&](auto at) {
    F32 all = F32{};
    for (int64_t r = 0; r < count; ++r) all += at.load(x + r * stride);
    at.add_floats(sums, all);
  });
}

template <class E>
struct SumOverRowsKernel {
  static constexpr int64_t kColumns = 4096;

  static int64_t chunks_per_matrix(const SumOverRowsProblem& p) { return p.parts() * divide_up(p.columns, kColumns); }

  static void chunk(const SumOverRowsProblem& p, int64_t batch, int64_t chunk) {
    const int64_t across = divide_up(p.columns, kColumns), part = chunk / across, first = chunk % across * kColumns;
    const int64_t count = std::min(kColumns, p.columns - first), last = std::min((part + 1) * kSummedRows, p.rows);
    float* sums = p.sums + (batch * p.parts() + part) * p.columns + first;
    std::fill_n(sums, count, 0.0f);
    for (int64_t row = part * kSummedRows; row < last; row += kBlock)
      add_sixteen<E>(from<E>(p.x, (batch * p.rows + row) * p.columns + first), last - row, p.columns, count, p.type, sums);
  }
};

/// Bytes moved: 4 for each sum of a part, once.
struct AddPartsKernel {
  static constexpr int64_t kColumns = 512;

  static int64_t chunks_per_matrix(const AddPartsProblem& p) { return divide_up(p.columns, kColumns); }

  static void chunk(const AddPartsProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * kColumns, count = std::min(kColumns, p.columns - first);
    const float* found = p.found + batch * p.parts * p.step + first;
    float sums[kAddedApart][kColumns] = {};
    for (int64_t part = 0; part < p.parts; ++part)
      for (int64_t i = 0; i < count; ++i) sums[part % kAddedApart][i] += found[part * p.step + i];
    for (int apart = 1; apart < kAddedApart; ++apart)
      for (int64_t i = 0; i < count; ++i) sums[0][i] += sums[apart][i];
    std::copy_n(sums[0], count, p.result + batch * p.columns + first);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
