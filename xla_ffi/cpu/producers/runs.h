// Runs of elements, vector by vector: whole vectors by the element's own loads, the rest of a run by count.
#pragma once

#include "../elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
