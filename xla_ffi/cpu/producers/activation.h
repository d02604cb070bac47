// Activations, plain and gated, and their gradients, element by element; and with them the amaxes of the results, while
// they are in the cache. Bytes moved: the operands once, the results once.
#pragma once

#include <algorithm>

#include "../../numerics/activations.h"
#include "../quantize/gather_amaxes.h"
#include "runs.h"
#include "table.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int64_t kActivationRun = 16 * 1024;  // elements of a chunk
constexpr int64_t kActivationColumns = 4096;   // of a band

/// How a problem is cut: runs of elements; where amaxes are wanted, bands of kBlock rows and some columns.
template <class Problem>
int64_t activation_chunks(const Problem& p, bool amaxes) {
  if (!amaxes) return divide_up(p.size, kActivationRun);
  return divide_up(p.size / p.columns, kBlock) * divide_up(p.columns, kActivationColumns);
}

/// Calls run(first element, count) for the run that a chunk is.
template <class Problem, class Run>
void visit_run(const Problem& p, int64_t batch, int64_t chunk, Run run) {
  const int64_t first = chunk * kActivationRun;
  run(batch * p.size + first, std::min(kActivationRun, p.size - first));
}

/// Calls run(first element, count) for the rows of the band that a chunk is, then slab(row, column) for the slabs of the
/// band. Rows are written in long runs, which the processor fetches ahead; the band then is in the cache.
template <class Problem, class Run, class Slab>
void visit_band(const Problem& p, int64_t batch, int64_t chunk, Run run, Slab slab) {
  const int64_t across = divide_up(p.columns, kActivationColumns), row = chunk / across * kBlock;
  const int64_t first = chunk % across * kActivationColumns, last = std::min(first + kActivationColumns, p.columns);
  for (int64_t r = row; r < std::min(row + kBlock, p.size / p.columns); ++r)
    run(batch * p.size + r * p.columns + first, last - first);
  for (int64_t column = first; column < last; column += kPacket) slab(row, column);
}

/// An activation of some elements from the one at `index` on.
template <class E, class Rule, bool kGated>
void activate(const ActivationProblem& p, int64_t index, int64_t count, typename E::Storage* result) {
  const Values<E, Rule> values;
  const auto *x = from<E>(p.x, index), *up = from<E>(p.up, index);
  along_run<E>(count, p.type, [&](auto at) {
    const F32 value = values.of(at, x);
    at.store(result, kGated ? value * at.load(up) : value);
  });
}

/// Its gradients there; dup is not written without up.
template <class E, class Rule, bool kGated>
void activation_gradients(const ActivationGradientProblem& p, int64_t index, int64_t count, typename E::Storage* dx,
                          typename E::Storage* dup) {
  const ValuesAndSlopes<E, Rule> values;
  const auto *dy = from<E>(p.dy, index), *x = from<E>(p.x, index), *up = from<E>(p.up, index);
  along_run<E>(count, p.type, [&](auto at) {
    const auto found = values.of(at, x);
    const F32 d = at.load(dy);
    if constexpr (kGated) {
      at.store(dx, (d * at.load(up)) * found.slope);
      at.store(dup, d * found.value);
    } else {
      at.store(dx, d * found.slope);
    }
  });
}

template <class E, class Rule, bool kGated>
struct ActivationKernel {
  static int64_t chunks_per_matrix(const ActivationProblem& p) { return activation_chunks(p, p.amaxes.wanted()); }

  static void chunk(const ActivationProblem& p, int64_t batch, int64_t chunk) {
    const auto run = [&](int64_t index, int64_t count) {
      activate<E, Rule, kGated>(p, index, count, from<E>(p.result, index));
    };
    if (!p.amaxes.wanted()) return visit_run(p, batch, chunk, run);
    GatheredAmaxes<E> amaxes(p.amaxes);
    visit_band(p, batch, chunk, run, [&](int64_t row, int64_t column) {
      amaxes.add(CachedSlab<E>(from<E>(p.result, batch * p.size), p.size / p.columns, p.columns, row, column));
    });
    amaxes.raise(batch);
  }
};

template <class E, class Rule, bool kGated>
struct ActivationGradientKernel {
  static int64_t chunks_per_matrix(const ActivationGradientProblem& p) { return activation_chunks(p, p.of_dx.wanted()); }

  static void chunk(const ActivationGradientProblem& p, int64_t batch, int64_t chunk) {
    const auto run = [&](int64_t index, int64_t count) {
      activation_gradients<E, Rule, kGated>(p, index, count, from<E>(p.dx, index), from<E>(p.dup, index));
    };
    if (!p.of_dx.wanted()) return visit_run(p, batch, chunk, run);
    GatheredAmaxes<E> of_dx(p.of_dx), of_dup(p.of_dup);
    visit_band(p, batch, chunk, run, [&](int64_t row, int64_t column) {
      const int64_t matrix = batch * p.size, rows = p.size / p.columns;
      of_dx.add(CachedSlab<E>(from<E>(p.dx, matrix), rows, p.columns, row, column));
      if (kGated) of_dup.add(CachedSlab<E>(from<E>(p.dup, matrix), rows, p.columns, row, column));
    });
    of_dx.raise(batch);
    if (kGated) of_dup.raise(batch);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
