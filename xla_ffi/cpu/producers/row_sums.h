// Sums of rows in the order of numerics.md 12.2.
#pragma once

#include "runs.h"

namespace jaxlowprec {
namespace JLP_ISA {

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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
