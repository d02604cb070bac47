// Activations, plain and gated, and their gradients, element by element; and with them the amaxes of the results, slab by
// slab, while a slab is in the cache. Bytes moved: the operands once, the results once.
#pragma once

#include <algorithm>

#include "../../numerics/activations.h"
#include "../quantize/gather_amaxes.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int64_t kActivationRun = 16 * 1024;        // elements of a chunk
constexpr int64_t kActivationColumns = 8 * kPacket;  // of a chunk of slabs, which has kBlock rows

/// The elements of an array from `index` on; null stays null.
template <class E>
auto* from(const void* x, int64_t index) {
  return x ? static_cast<const typename E::Storage*>(x) + index : nullptr;
}
template <class E>
auto* from(void* x, int64_t index) {
  return x ? static_cast<typename E::Storage*>(x) + index : nullptr;
}

/// Calls visit(load, store) along a run of elements: load(array) reads the next vector of an array, store(array, vector)
/// writes it. Whole vectors go by the element's own loads; the rest, by count.
template <class E, class Visit>
void along_run(int64_t count, ElementType type, Visit visit) {
  using Storage = typename E::Storage;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    visit([&](const Storage* p) { return E::load_lanes(p + i); }, [&](Storage* p, F32 v) { E::store_lanes(p + i, v); });
  if (const int rest = static_cast<int>(count - i); rest > 0)
    visit([&](const Storage* p) { return load_elements(p, type, i, rest); },
          [&](Storage* p, F32 v) { store_elements(p, type, i, rest, v); });
}

/// How a problem is cut: runs of elements, or without regard to `rows` slabs side by side where amaxes are wanted.
template <class Problem>
int64_t activation_chunks(const Problem& p, bool amaxes) {
  if (!amaxes) return divide_up(p.size, kActivationRun);
  return divide_up(p.size / p.columns, kBlock) * divide_up(p.columns, kActivationColumns);
}

/// Calls visit(first element, count) for the run that a chunk is.
template <class Problem, class Visit>
void visit_run(const Problem& p, int64_t chunk, Visit visit) {
  const int64_t first = chunk * kActivationRun;
  visit(first, std::min(kActivationRun, p.size - first));
}

/// Calls visit(row, column, rows, columns) for the slabs of a chunk.
template <class Problem, class Visit>
void visit_slabs(const Problem& p, int64_t chunk, Visit visit) {
  const int64_t across = divide_up(p.columns, kActivationColumns), row = chunk / across * kBlock;
  const int64_t first = chunk % across * kActivationColumns, last = std::min(first + kActivationColumns, p.columns);
  const int rows = static_cast<int>(std::min<int64_t>(kBlock, p.size / p.columns - row));
  for (int64_t column = first; column < last; column += kPacket)
    visit(row, column, rows, static_cast<int>(std::min<int64_t>(kPacket, last - column)));
}

template <class E, class Rule, bool kGated>
struct ActivationKernel {
  using Storage = typename E::Storage;

  static int64_t chunks_per_matrix(const ActivationProblem& p) { return activation_chunks(p, p.amaxes.wanted()); }

  static void chunk(const ActivationProblem& p, int64_t batch, int64_t chunk) {
    const int64_t matrix = batch * p.size;
    if (!p.amaxes.wanted())
      return visit_run(
          p, chunk, [&](int64_t first, int64_t count) { run(p, matrix + first, count, from<E>(p.result, matrix + first)); });
    GatheredAmaxes<E> amaxes(p.amaxes);
    visit_slabs(p, chunk, [&](int64_t row, int64_t column, int rows, int columns) {
      Slab<E> y(rows, columns);
      for (int r = 0; r < rows; ++r) run(p, matrix + (row + r) * p.columns + column, columns, y.x[r]);
      y.write_to(from<E>(p.result, matrix), p.columns, row, column);
      amaxes.add(y);
    });
    amaxes.raise(batch);
  }

 private:
  JLP_RULE void run(const ActivationProblem& p, int64_t index, int64_t count, Storage* to) {
    const Storage *x = from<E>(p.x, index), *up = from<E>(p.up, index);
    along_run<E>(count, p.type, [&](auto load, auto store) {
      const F32 value = Rule::value(load(x));
      store(to, kGated ? value * load(up) : value);
    });
  }
};

template <class E, class Rule, bool kGated>
struct ActivationGradientKernel {
  using Storage = typename E::Storage;

  static int64_t chunks_per_matrix(const ActivationGradientProblem& p) { return activation_chunks(p, p.of_dx.wanted()); }

  static void chunk(const ActivationGradientProblem& p, int64_t batch, int64_t chunk) {
    const int64_t matrix = batch * p.size;
    if (!p.of_dx.wanted())
      return visit_run(p, chunk, [&](int64_t first, int64_t count) {
        run(p, matrix + first, count, from<E>(p.dx, matrix + first), from<E>(p.dup, matrix + first));
      });
    GatheredAmaxes<E> of_dx(p.of_dx), of_dup(p.of_dup);
    visit_slabs(p, chunk, [&](int64_t row, int64_t column, int rows, int columns) {
      Slab<E> dx(rows, columns), dup(rows, columns);
      for (int r = 0; r < rows; ++r) run(p, matrix + (row + r) * p.columns + column, columns, dx.x[r], dup.x[r]);
      dx.write_to(from<E>(p.dx, matrix), p.columns, row, column);
      of_dx.add(dx);
      if (!kGated) return;
      dup.write_to(from<E>(p.dup, matrix), p.columns, row, column);
      of_dup.add(dup);
    });
    of_dx.raise(batch);
    if (kGated) of_dup.raise(batch);
  }

 private:
  JLP_RULE void run(const ActivationGradientProblem& p, int64_t index, int64_t count, Storage* dx, Storage* dup) {
    const Storage *dy = from<E>(p.dy, index), *x = from<E>(p.x, index), *up = from<E>(p.up, index);
    along_run<E>(count, p.type, [&](auto load, auto store) {
      const auto found = Rule::with_slope(load(x));
      const F32 d = load(dy);
      if constexpr (kGated) {
        store(dx, (d * load(up)) * found.slope);
        store(dup, d * found.value);
      } else {
        store(dx, d * found.slope);
      }
    });
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
