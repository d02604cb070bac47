// What quantisation did to an array.
#include <algorithm>
#include <cmath>

#include "../elements.h"
#include "../entry.h"
#include "sums.h"

namespace jaxlowprec {
namespace JLP_ISA {

// The largest magnitude and the root mean square of an array, and how many elements of its columns are beyond a threshold.
//
// Squares are added up in float32 for a stretch of elements where none of them overflows and what underflows is too small to
// matter, and in float64 from stretch to stretch; other stretches take float64 throughout.
// Bytes moved per element: the element read, by each.

struct Moments {
  static int64_t chunks_per_matrix(const MomentsProblem& p) { return p.parts(); }

  static void chunk(const MomentsProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * kMomentsElements, last = std::min(first + kMomentsElements, p.size);
    Found found;
    for (int64_t i = first; i < last; i += kStretch) {
      const int64_t count = std::min(kStretch, last - i), index = batch * p.size + i;
      const bool done = count == kStretch && with_element(p.type, [&](auto element) {
                          using E = decltype(element);
                          return plain<E>(static_cast<const typename E::Storage*>(p.x) + index, found);
                        });
      if (!done) careful(p, index, count, found);
    }
    float* result = p.result + 2 * (batch * chunks_per_matrix(p) + chunk);
    const uint32_t largest = max_lane(found.most);
    memcpy(result, &largest, sizeof largest);
    result[1] = static_cast<float>(std::sqrt(found.energy.total() / (last - first)));
  }

 private:
  static constexpr int64_t kStretch = 1024;
  static constexpr uint32_t kLeast = (127 - 40) << 23, kMost = (127 + 58) << 23;  // 2^-40, 2^58: 1024 squares fit

  struct Found {
    U32 most = U32{};
    LanesOfSums energy;
  };

  /// False, and nothing done, where the largest magnitude is out of the ordinary.
  template <class E>
  __attribute__((noinline)) static bool plain(const typename E::Storage* x, Found& found) {
    constexpr int kChains = 4;
    U32 most[kChains] = {};
    F32 energy[kChains] = {};
    for (int64_t i = 0; i < kStretch; i += kChains * kLanes) {
      JLP_UNROLL(4)
      for (int j = 0; j < kChains; ++j) {
        const F32 v = E::load_lanes(x + i + j * kLanes);
        most[j] = max_magnitude(most[j], magnitude(v)), energy[j] += v * v;
      }
    }
    const U32 all = max_magnitude(max_magnitude(most[0], most[1]), max_magnitude(most[2], most[3]));
    const uint32_t largest = max_lane(all);
    if (largest < kLeast || largest > kMost) return false;
    found.most = max_magnitude(found.most, all);
    found.energy.add((energy[0] + energy[1]) + (energy[2] + energy[3]));
    return true;
  }

  static void careful(const MomentsProblem& p, int64_t index, int64_t count, Found& found) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32 v = load_elements(p.x, p.type, index + i, static_cast<int>(std::min<int64_t>(kLanes, count - i)));
      const U32 bits = finite_magnitude(v);
      found.most = max_magnitude(found.most, bits);
      found.energy.add_squares(L::from_bits(bits));
    }
  }
};

struct Outliers {
  static int64_t chunks_per_matrix(const OutliersProblem& p) { return p.parts(); }

  static void chunk(const OutliersProblem& p, int64_t batch, int64_t chunk) {
    int32_t* counts = p.result + (batch * chunks_per_matrix(p) + chunk) * p.columns;
    std::fill_n(counts, p.columns, 0);
    const uint32_t threshold = Lanes<float>::bits(p.threshold[batch]);
    const int64_t first = chunk * p.rows_each(), last = std::min(first + p.rows_each(), p.rows);
    with_element(p.type, [&](auto element) {
      using E = decltype(element);
      const auto* x = static_cast<const typename E::Storage*>(p.x) + batch * p.rows * p.columns;
      for (int64_t row = first; row < last; row += kRows)
        count_rows<E>(x + row * p.columns, std::min(kRows, last - row), p, threshold, counts);
    });
  }

 private:
  static constexpr int64_t kRows = 8;  // whose counts stay in registers

  template <class E>
  __attribute__((noinline)) static void count_rows(const typename E::Storage* x, int64_t rows, const OutliersProblem& p,
                                                   uint32_t threshold, int32_t* counts) {
    const U32 limit = fill<F32>(std::max(threshold, kMinNormalBits - 1)), infinity = fill<F32>(kInfinityBits);
    int64_t column = 0;
    for (; column + kLanes <= p.columns; column += kLanes) {
      U32 found = load<U32>(counts + column);
      for (int64_t row = 0; row < rows; ++row) {
        const U32 size = magnitude(E::load_lanes(x + row * p.columns + column));
        found = one_more(found, both(less(limit, size), less(size, infinity)));
      }
      store(counts + column, found);
    }
    for (; column < p.columns; ++column)
      for (int64_t row = 0; row < rows; ++row) {
        const uint32_t size = finite_magnitude(load_elements(x, p.type, row * p.columns + column, 1))[0];
        counts[column] += size > threshold;
      }
  }
};

namespace {

template <class Operation>
struct Always {
  template <class Problem, class Visit>
  auto operator()(const Problem&, Visit visit) const {
    return visit(Operation{});
  }
};
constexpr Always<Moments> resolve_moments;
constexpr Always<Outliers> resolve_outliers;
constexpr Always<Sums> resolve_sums;

}  // namespace

JLP_DEFINE_ENTRY(moments, MomentsProblem, resolve_moments)
JLP_DEFINE_ENTRY(outliers, OutliersProblem, resolve_outliers)
JLP_DEFINE_ENTRY(sums, SumsProblem, resolve_sums)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
