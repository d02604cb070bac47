// Rows of norms (numerics.md 12.2): their numbers, and their elements wherever they are wanted.
#pragma once

#include <cmath>

#include "../tiles.h"
#include "sum_over_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// What the rows of a matrix are multiplied by, and what is added. Elements are taken in pairs of vectors, those at even and
/// those at odd places, and so are these.
struct NormParameters {
  const float *weight, *beta;          // [columns], in order; beta null: none
  float *paired_weight, *paired_beta;  // the whole pairs of vectors
  bool finite;

  static int64_t bytes(const NormProblem& p) { return 2 * divide_up(p.columns, 2 * kLanes) * 2 * kLanes * sizeof(float); }

  /// `memory`: bytes(p) of it, 64-byte aligned.
  NormParameters(const NormProblem& p, int64_t batch, uint8_t* memory)
      : weight(p.weight + batch * p.columns),
        beta(p.beta ? p.beta + batch * p.columns : nullptr),
        paired_weight(reinterpret_cast<float*>(memory)),
        paired_beta(reinterpret_cast<float*>(memory + bytes(p) / 2)) {
    finite = pair(weight, p.columns, paired_weight);
    if (beta) finite &= pair(beta, p.columns, paired_beta);
  }

 private:
  /// Returns whether all numbers are finite.
  static bool pair(const float* from, int64_t count, float* to) {
    U32 most = U32{};
    int64_t k = 0;
    for (; k + 2 * kLanes <= count; k += 2 * kLanes) {
      const Pair v = Float::load_pair(from + k);
      store(to + k, v.even), store(to + k + kLanes, v.odd);
      most = max_magnitude(most, max_magnitude(magnitude(v.even), magnitude(v.odd)));
    }
    bool finite = max_lane(most) < kInfinityBits;
    for (; k < count; ++k) finite &= std::isfinite(from[k]);
    return finite;
  }
};

/// A row of a matrix, whose numbers are known.
template <class E, bool kLayer>
struct NormedRow {
  using Storage = typename E::Storage;
  const Storage* x;  // with the residual, if there is one
  ElementType type;
  float mean = 0.0f, inverse = 0.0f;

  /// Whose numbers the problem has already.
  static NormedRow recalled(const NormProblem& p, int64_t line) {
    NormedRow row(p, line);
    if (kLayer) row.mean = p.mean[line];
    row.inverse = p.inverse[line];
    return row;
  }

  /// Whose numbers are found, and stored; so is the sum of x and the residual.
  ///
  /// kFetches: the next row is fetched into the cache meanwhile: its sums would wait for it.
  template <bool kFetches>
  static NormedRow found(const NormProblem& p, int64_t line) {
    if (p.residual) store_total(p, line * p.columns);
    NormedRow row(p, line);
    const Storage* next = from<E>(p.x, (line + 1) * p.columns);
    const float each = static_cast<float>(1.0 / p.columns);
    const auto element = [&](auto at) {
      if (kFetches) __builtin_prefetch(next + at.k);
      return row.widened(at.load(row.x));
    };
    if (kLayer) p.mean[line] = row.mean = sum_of_row<E>(p.columns, p.type, element) * each;
    const auto square = [&](auto at) {
      const F32 v = row.centered(kLayer ? at.load(row.x) : element(at));
      return at.only(v * v);
    };
    p.inverse[line] = row.inverse = 1.0f / std::sqrt(sum_of_row<E>(p.columns, p.type, square) * each + p.epsilon);
    return row;
  }

  /// `count` elements from `first` on, a multiple of 2 * kLanes, to `to`. `visit(k)` is called at every 2 * kLanes.
  template <class Visit>
  void write(const NormParameters& with, int64_t first, int64_t count, Storage* to, Visit visit) const {
    // The inverse of a finite row is a positive number. The result is NaN only where an operand is not finite.
    with.finite&& inverse > 0.0f && inverse < __builtin_inff() ? write_as<true>(with, first, count, to, visit)
                                                               : write_as<false>(with, first, count, to, visit);
  }
  void write(const NormParameters& with, int64_t first, int64_t count, Storage* to) const {
    write(with, first, count, to, [](int64_t) {});
  }

 private:
  NormedRow(const NormProblem& p, int64_t line) : x(from<E>(p.total ? p.total : p.x, line * p.columns)), type(p.type) {}

  JLP_RULE F32 widened(F32 v) { return L::flush(v); }
  F32 centered(F32 v) const { return kLayer ? widened(v) - mean : widened(v); }

  template <bool kNumbers, class Visit>
  void write_as(const NormParameters& with, int64_t first, int64_t count, Storage* to, Visit visit) const {
    int64_t k = 0;
    for (; k + 2 * kLanes <= count; k += 2 * kLanes) {
      visit(k);
      Pair v = E::load_pair(x + first + k);
      v.even = (centered(v.even) * inverse) * load<F32>(with.paired_weight + first + k);
      v.odd = (centered(v.odd) * inverse) * load<F32>(with.paired_weight + first + k + kLanes);
      if (kLayer && with.beta) {
        v.even = v.even + load<F32>(with.paired_beta + first + k);
        v.odd = v.odd + load<F32>(with.paired_beta + first + k + kLanes);
      }
      kNumbers ? E::store_numbers(to + k, v) : E::store_pair(to + k, v);
    }
    if (k == count) return;
    const Storage* rest = x + first + k;
    const float *weight = with.weight + first + k, *beta = with.beta ? with.beta + first + k : nullptr;
    along_run<E>(count - k, type, [&](auto at) {
      const F32 v = (centered(at.load(rest)) * inverse) * at.load_floats(weight);
      at.store(to + k, kLayer && beta ? v + at.load_floats(beta) : v);
    });
  }

  /// x + residual, rounded to the element type, at p.total.
  static void store_total(const NormProblem& p, int64_t index) {
    const Storage *x = from<E>(p.x, index), *residual = from<E>(p.residual, index);
    Storage* sum = from<E>(p.total, index);
    along_run<E>(p.columns, p.type, [&](auto at) { at.store(sum, widened(at.load(x)) + at.load(residual)); });
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
