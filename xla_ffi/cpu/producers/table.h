// Activations of bfloat16 by tables of all 65,536 arguments, filled by the rule and so with its bits. Ordinary arguments
// look up a few KiB, which stay in the cache: that takes less time than the exponential and the division.
#pragma once

#include <type_traits>

#include "../../numerics/activations.h"
#include "runs.h"

namespace jaxlowprec {
namespace JLP_ISA {

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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
