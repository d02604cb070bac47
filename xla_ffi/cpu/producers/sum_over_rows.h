// Sums over rows in the order of numerics.md 12.3, and the sums of parts of the rows, added up.
//
// A chunk is a part of the rows, of some columns: its sums are added to sixteen rows at a time, in vectors.
// Bytes moved per element: what it has, and 1/16 for the sums of parts.
#pragma once

#include <algorithm>

#include "../elements.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- Runs of elements, vector by vector: whole vectors by the element's own loads, the rest of a run by count.

/// The elements of an array from `index` on; null stays null.
template <class E>
auto* from(const void* x, int64_t index) {
  return x ? static_cast<const typename E::Storage*>(x) + index : nullptr;
}
template <class E>
auto* from(void* x, int64_t index) {
  return x ? static_cast<typename E::Storage*>(x) + index : nullptr;
}

/// The kLanes elements of runs from place k on.
template <class E>
struct WholeVector {
  using Storage = typename E::Storage;
  int64_t k;

  F32 load(const Storage* p) const { return E::load_lanes(p + k); }
  F32 load_floats(const float* p) const { return JLP_ISA::load<F32>(p + k); }
  void store(Storage* p, F32 v) const { E::store_lanes(p + k, v); }
  void add_floats(float* p, F32 v) const { JLP_ISA::store(p + k, load_floats(p) + v); }
  F32 only(F32 v) const { return v; }
};

/// The last `count` elements, fewer than kLanes.
template <class E>
struct PartOfVector {
  using Storage = typename E::Storage;
  int64_t k;
  ElementType type;
  int count;

  F32 load(const Storage* p) const { return load_elements(p, type, k, count); }
  F32 load_floats(const float* p) const { return load_elements(p, ElementType::kF32, k, count); }
  void store(Storage* p, F32 v) const { store_elements(p, type, k, count, v); }
  void add_floats(float* p, F32 v) const { store_elements(p, ElementType::kF32, k, count, load_floats(p) + v); }
  /// v, with zeros in the lanes beyond.
  F32 only(F32 v) const {
    float lanes[kLanes];
    JLP_ISA::store(lanes, v);
    return load_elements(lanes, ElementType::kF32, 0, count);
  }
};

/// Calls visit(place) along a run of elements, with a WholeVector or a PartOfVector.
template <class E, class Visit>
JLP_RULE void along_run(int64_t count, ElementType type, Visit visit) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) visit(WholeVector<E>{k});
  if (k < count) visit(PartOfVector<E>{k, type, static_cast<int>(count - k)});
}

// --- Sums of rows in the order of numerics.md 12.2.

/// The sum of a row: 256 sums by place, added up by halves. value(place): the vector there; its lanes beyond the row are
/// zero.
template <class E, class Value>
JLP_RULE float sum_of_row(int64_t columns, ElementType type, Value value) {
  constexpr int kPlaces = 256, kVectors = kPlaces / kLanes;
  constexpr int kAtOnce = kLanes == 8 ? 8 : 16;  // sums that the processor's registers hold
  F32 sums[kVectors];
  for (int j = 0; j < kVectors; j += kAtOnce) {
    const auto at = [&](int64_t k) {
      if (k + kLanes <= columns) return value(WholeVector<E>{k});
      return k < columns ? value(PartOfVector<E>{k, type, static_cast<int>(columns - k)}) : F32{};
    };
    const int64_t start = j * kLanes;
    F32 part[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) part[i] = at(start + i * kLanes) + 0.0f;  // -0 becomes 0
    int64_t first = kPlaces;
    for (; first + kPlaces <= columns; first += kPlaces) {
      JLP_UNROLL(16)
      for (int i = 0; i < kAtOnce; ++i) part[i] += value(WholeVector<E>{first + start + i * kLanes});
    }
    if (first < columns)
      for (int i = 0; i < kAtOnce; ++i) part[i] += at(first + start + i * kLanes);
    for (int i = 0; i < kAtOnce; ++i) sums[j + i] = part[i];
  }
  for (int half = kVectors / 2; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  alignas(64) float lanes[kLanes];
  store(lanes, sums[0]);
  for (int half = kLanes / 2; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
  return lanes[0];
}

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
