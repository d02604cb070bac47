// The ranges of runs, elements that share a scale: the largest magnitude over the median.
#pragma once

#include "count_elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Magnitudes of a run: those in the middle of the ascending order, and the largest.
template <class U>
struct Middle {
  U below, above, largest;
};

/// Each lane's numbers in ascending order, by Batcher's network.
template <int kCount>
void sort_lanes(U32 (&v)[kCount]) {
  for (int merged = 1; merged < kCount; merged *= 2)
    for (int distance = merged; distance >= 1; distance /= 2)
      for (int start = distance % merged; start + distance < kCount; start += 2 * distance)
        for (int i = start; i < start + distance && i + distance < kCount; ++i) {
          if ((i ^ (i + distance)) >= 2 * merged) continue;
          const U32 a = v[i], b = v[i + distance], most = max_magnitude(a, b);
          v[i] = a ^ b ^ most, v[i + distance] = most;
        }
}

/// Of as many runs as there are lanes; of those that do not exist, zeros.
template <int kRun>
Middle<U32> find_middles(const float* x, int runs) {
  U32 sizes[kRun];
  for (int k = 0; k < kRun; k += kLanes) {
    U32 square[kLanes];
    for (int run = 0; run < kLanes; ++run)
      square[run] = run < runs ? finite_magnitude(load<F32>(x + run * kRun + k)) : U32{};
    transpose(square);
    for (int i = 0; i < kLanes; ++i) sizes[k + i] = square[i];
  }
  sort_lanes(sizes);
  return {sizes[kRun / 2 - 1], sizes[kRun / 2], sizes[kRun - 1]};
}

/// Of one run, by how many are less than each.
inline Middle<uint32_t> find_middle(const float* x, int run) {
  alignas(64) uint32_t sizes[kRangeRun];
  for (int k = 0; k < run; k += kLanes) store(sizes + k, finite_magnitude(load<F32>(x + k)));
  const uint32_t middle = run / 2;
  U32 most_below = U32{}, most_above = U32{}, most = U32{};
  for (int k = 0; k < run; k += kLanes) {
    const U32 size = load<U32>(sizes + k);
    U32 smaller = U32{};
    for (int j = 0; j < run; ++j) smaller = one_more(smaller, less(fill<F32>(sizes[j]), size));
    most_below = max_magnitude(most_below, smaller < middle ? size : U32{});
    most_above = max_magnitude(most_above, smaller <= middle ? size : U32{});
    most = max_magnitude(most, size);
  }
  return {max_lane(most_below), max_lane(most_above), max_lane(most)};
}

/// Each lane a run; those whose median is zero do not count.
inline void add_ranges(const Middle<U32>& found, float unit, Counted& counted) {
  const F32 median = L::from_bits(found.below) * unit / 2 + L::from_bits(found.above) * unit / 2;
  const Which spread = not_zero(L::bits(L::flush(median)));
  counted.ranges.add(keep(L::from_bits(found.largest) * unit / median, spread));
  counted.runs = one_more(counted.runs, spread);
}

/// Of a line's whole runs.
inline void count_ranges(int run, const Line& line, float unit, Counted& counted) {
  const int runs = line.length / run;
  for (int at = 0; at < runs; at += kLanes) {
    Middle<U32> found = {};
    const float* x = line.x + at * run;
    const int here = std::min(kLanes, runs - at);
    if (run == 16) {
      found = find_middles<16>(x, here);
    } else if (run == 32) {
      found = find_middles<32>(x, here);
    } else {
      for (int i = 0; i < here; ++i) {
        const Middle<uint32_t> one = find_middle(x + i * run, run);
        found.below[i] = one.below, found.above[i] = one.above, found.largest[i] = one.largest;
      }
    }
    add_ranges(found, unit, counted);
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
