// Activations, plain and gated, and their gradients, element by element; and with them the amaxes of the results, and sums
// of gradients over rows, while they are in the cache. Bytes moved: the operands once, the results once; and for sums, of
// parts of 64 rows, 1/16 an element of a gradient.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../numerics/activations.h"
#include "../entry.h"
#include "../quantize/gather_amaxes.h"
#include "sum_over_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

// The compile-time cases of activations: the type of elements, the rule, and whether there is a second operand.

template <template <class, class, bool> class Kernel>
struct ByActivation {
  template <class Problem, class Visit>
  auto operator()(const Problem& p, Visit visit) const {
    return with_element(p.type, [&](auto element) {
      return with_rule(p.kind, [&](auto rule) {
        return with_bool(p.up != nullptr, [&](auto gated) {
          return visit(Kernel<decltype(element), decltype(rule), decltype(gated)::value>{});
        });
      });
    });
  }
};

// Activations of bfloat16 by tables of all 65,536 arguments, filled by the rule and so with its bits. Ordinary arguments
// look up a few KiB, which stay in the cache: that takes less time than the exponential and the division.

constexpr int kBF16Values = 1 << 16;

/// Rule::value of every bfloat16, by its bits.
template <class Rule>
class ValueTable {
 public:
  /// Filled by the first call, in 0.1 ms.
  static const ValueTable& filled() {
    static const ValueTable table;
    return table;
  }
  /// Of kLanes arguments.
  F32 look_up(const uint16_t* x) const {
    F32 found;
    for (int i = 0; i < kLanes; ++i) found[i] = values_[x[i]];
    return found;
  }

 private:
  ValueTable() {
    uint16_t x[kLanes];
    for (int bits = 0; bits < kBF16Values; bits += kLanes) {
      for (int i = 0; i < kLanes; ++i) x[i] = static_cast<uint16_t>(bits + i);
      store(&values_[bits], Rule::value(BF16::load_lanes(x)));
    }
  }

  float values_[kBF16Values];
};

/// Rule::with_slope of every bfloat16.
template <class Rule>
class SlopeTable {
 public:
  static const SlopeTable& filled() {
    static const SlopeTable table;
    return table;
  }
  ValueAndSlope<F32> look_up(const uint16_t* x) const {
    constexpr int kHalf = kLanes / 2;
    F64 low, high;  // a pair in each
    for (int i = 0; i < kHalf; ++i) low[i] = pairs_[x[i]], high[i] = pairs_[x[kHalf + i]];
    return {shuffle<EvenLanes>((F32)low, (F32)high), shuffle<OddLanes>((F32)low, (F32)high)};
  }

 private:
  typedef double F64 __attribute__((vector_size(JLP_VECTOR_BYTES)));

  SlopeTable() {
    uint16_t x[kLanes];
    for (int bits = 0; bits < kBF16Values; bits += kLanes) {
      for (int i = 0; i < kLanes; ++i) x[i] = static_cast<uint16_t>(bits + i);
      const ValueAndSlope<F32> found = Rule::with_slope(BF16::load_lanes(x));
      store_interleaved(&pairs_[bits], found.value, found.slope);
    }
  }

  double pairs_[kBF16Values];  // the bits of a value and of its slope
};

/// Whether numbers are looked up: bfloat16 under a rule that takes an exponential.
template <class E, class Rule>
constexpr bool kLookedUp = std::is_same<E, BF16>::value && !std::is_same<Rule, ReluSquared>::value;

/// An activation of the vectors of runs, by the table or by the rule.
template <class E, class Rule, bool = kLookedUp<E, Rule>>
struct Values {
  template <class Place>
  F32 of(Place at, const typename E::Storage* x) const {
    return Rule::value(at.load(x));
  }
};
template <class E, class Rule>
struct Values<E, Rule, true> {
  const ValueTable<Rule>& table = ValueTable<Rule>::filled();

  F32 of(WholeVector<E> at, const uint16_t* x) const { return table.look_up(x + at.k); }
  F32 of(PartOfVector<E> at, const uint16_t* x) const { return Rule::value(at.load(x)); }
};

/// The same with its derivative.
template <class E, class Rule, bool = kLookedUp<E, Rule>>
struct ValuesAndSlopes {
  template <class Place>
  ValueAndSlope<F32> of(Place at, const typename E::Storage* x) const {
    return Rule::with_slope(at.load(x));
  }
};
template <class E, class Rule>
struct ValuesAndSlopes<E, Rule, true> {
  const SlopeTable<Rule>& table = SlopeTable<Rule>::filled();

  ValueAndSlope<F32> of(WholeVector<E> at, const uint16_t* x) const { return table.look_up(x + at.k); }
  ValueAndSlope<F32> of(PartOfVector<E> at, const uint16_t* x) const { return Rule::with_slope(at.load(x)); }
};

constexpr int64_t kActivationRun = 16 * 1024;  // elements of a chunk
constexpr int64_t kActivationColumns = 4096;   // of a band

/// How a problem is cut: runs of elements; or, where more of the results is wanted, some rows and columns.
template <class Problem>
int64_t activation_chunks(const Problem& p, int64_t rows) {
  if (rows == 0) return divide_up(p.size, kActivationRun);
  return divide_up(p.size / p.columns, rows) * divide_up(p.columns, kActivationColumns);
}

/// Calls run(first element, count) for the run that a chunk is.
template <class Problem, class Run>
void visit_run(const Problem& p, int64_t batch, int64_t chunk, Run run) {
  const int64_t first = chunk * kActivationRun;
  run(batch * p.size + first, std::min(kActivationRun, p.size - first));
}

/// Calls run(first element, count) for the rows of each band of kBlock rows of a chunk, then band(row, first column, last).
/// Rows are written in long runs, which the processor fetches ahead; the band then is in the cache.
template <class Problem, class Run, class Band>
void visit_bands(const Problem& p, int64_t batch, int64_t chunk, int64_t rows, Run run, Band band) {
  const int64_t across = divide_up(p.columns, kActivationColumns), start = chunk / across * rows;
  const int64_t first = chunk % across * kActivationColumns, last = std::min(first + kActivationColumns, p.columns);
  const int64_t end = std::min(start + rows, p.size / p.columns);
  for (int64_t row = start; row < end; row += kBlock) {
    for (int64_t r = row; r < std::min(row + kBlock, end); ++r) run(batch * p.size + r * p.columns + first, last - first);
    band(row, first, last);
  }
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
  static int64_t chunks_per_matrix(const ActivationProblem& p) { return activation_chunks(p, rows_of(p)); }

  static void chunk(const ActivationProblem& p, int64_t batch, int64_t chunk) {
    const auto run = [&](int64_t index, int64_t count) {
      activate<E, Rule, kGated>(p, index, count, from<E>(p.result, index));
    };
    if (rows_of(p) == 0) return visit_run(p, batch, chunk, run);
    GatheredAmaxes<E> amaxes(p.amaxes);
    visit_bands(p, batch, chunk, rows_of(p), run, [&](int64_t row, int64_t first, int64_t last) {
      for (int64_t column = first; column < last; column += kPacket)
        amaxes.add(CachedSlab<E>(from<E>(p.result, batch * p.size), p.size / p.columns, p.columns, row, column));
    });
    amaxes.raise(batch);
  }

 private:
  static int64_t rows_of(const ActivationProblem& p) { return p.amaxes.wanted() ? kBlock : 0; }
};

template <class E, class Rule, bool kGated>
struct ActivationGradientKernel {
  static int64_t chunks_per_matrix(const ActivationGradientProblem& p) { return activation_chunks(p, rows_of(p)); }

  static void chunk(const ActivationGradientProblem& p, int64_t batch, int64_t chunk) {
    const auto run = [&](int64_t index, int64_t count) {
      activation_gradients<E, Rule, kGated>(p, index, count, from<E>(p.dx, index), from<E>(p.dup, index));
    };
    if (rows_of(p) == 0) return visit_run(p, batch, chunk, run);
    GatheredAmaxes<E> of_dx(p.of_dx), of_dup(p.of_dup);
    visit_bands(p, batch, chunk, rows_of(p), run, [&](int64_t row, int64_t first, int64_t last) {
      band(p, batch, row, {first, last}, 0, p.dx, of_dx);
      if (kGated) band(p, batch, row, {first, last}, 1, p.dup, of_dup);
    });
    of_dx.raise(batch);
    if (kGated) of_dup.raise(batch);
  }

 private:
  struct Columns {
    int64_t first, last;
  };

  /// What is wanted of a band of a gradient, the `which`-th.
  static void band(const ActivationGradientProblem& p, int64_t batch, int64_t row, Columns columns, int which,
                   const void* gradient, GatheredAmaxes<E>& amaxes) {
    const auto* matrix = from<E>(gradient, batch * p.size);
    if (amaxes.wanted())
      for (int64_t column = columns.first; column < columns.last; column += kPacket)
        amaxes.add(CachedSlab<E>(matrix, p.rows(), p.columns, row, column));
    if (!p.sums) return;
    float* sums = p.sums + (batch * p.parts() + row / kSummedRows) * p.sums_each() + which * p.columns + columns.first;
    const int64_t count = columns.last - columns.first;
    if (row % kSummedRows == 0) std::fill_n(sums, count, 0.0f);
    const auto* x = matrix + row * p.columns + columns.first;
    add_sixteen<E>(x, p.rows() - row, p.columns, count, p.type, sums);
  }

  static int64_t rows_of(const ActivationGradientProblem& p) { return p.sums ? kSummedRows : p.of_dx.wanted() ? kBlock : 0; }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
