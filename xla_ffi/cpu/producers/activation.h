// Activations, plain and gated, and their gradients, element by element.
#pragma once

#include <algorithm>

#include "../../numerics/activations.h"
#include "../elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int64_t kActivationRun = 16 * 1024;  // elements of a chunk

/// Calls visit(index, load, store, count of lanes) along a run: load(array) reads a vector there, store(array, vector)
/// writes. Whole vectors go by the element's own loads; the rest, by count.
template <class E, class Visit>
void along_run(int64_t first, int64_t last, ElementType type, Visit visit) {
  using Storage = typename E::Storage;
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
    visit([&](const void* p) { return E::load_lanes(static_cast<const Storage*>(p) + i); },
          [&](void* p, F32 v) { E::store_lanes(static_cast<Storage*>(p) + i, v); });
  }
  if (const int rest = static_cast<int>(last - i); rest > 0)
    visit([&](const void* p) { return load_elements(p, type, i, rest); },
          [&](void* p, F32 v) { store_elements(p, type, i, rest, v); });
}

template <class E, class Rule, bool kGated>
struct ActivationKernel {
  static int64_t chunks_per_matrix(const ActivationProblem& p) { return (p.size + kActivationRun - 1) / kActivationRun; }

  static void chunk(const ActivationProblem& p, int64_t, int64_t chunk) {
    const int64_t first = chunk * kActivationRun, last = std::min(first + kActivationRun, p.size);
    along_run<E>(first, last, p.type, [&](auto load, auto store) {
      const F32 value = Rule::value(load(p.x));
      store(p.result, kGated ? value * load(p.up) : value);
    });
  }
};

template <class E, class Rule, bool kGated>
struct ActivationGradientKernel {
  static int64_t chunks_per_matrix(const ActivationGradientProblem& p) {
    return (p.size + kActivationRun - 1) / kActivationRun;
  }

  static void chunk(const ActivationGradientProblem& p, int64_t, int64_t chunk) {
    const int64_t first = chunk * kActivationRun, last = std::min(first + kActivationRun, p.size);
    along_run<E>(first, last, p.type, [&](auto load, auto store) {
      const auto found = Rule::with_slope(load(p.x));
      const F32 dy = load(p.dy);
      if constexpr (kGated) {
        store(p.dx, (dy * load(p.up)) * found.slope);
        store(p.dup, dy * found.value);
      } else {
        store(p.dx, dy * found.slope);
      }
    });
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
