// The range of a run of elements: its largest over its median magnitude. Of the 32 lines of a tile two have theirs taken.
//
// Data flow: magnitudes of 2 lines by 128 elements in shared memory -> each thread counts how many of its element's run are
// less -> the two in the middle, and the largest, by maxima over the run -> a thread for each run adds its range.
#pragma once

#include "elements.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kRangesLines = 2, kRangesLength = kRangeRun, kMostRuns = kRangesLines * kRangesLength / 16;

struct RangesShared {
  uint32_t sizes[kRangesLines][kRangesLength];                   // finite magnitudes
  uint32_t below[kMostRuns], above[kMostRuns], most[kMostRuns];  // of each run: places run / 2 - 1 and run / 2, and the last
  double ranges[kMostRuns];                                      // added up so far, each by a thread
  uint32_t runs[kMostRuns];                                      // how many
};

JLP_DEVICE void clear_ranges(RangesShared& shared) {
  const int i = threadIdx.x;
  if (i >= kMostRuns) return;
  shared.below[i] = shared.above[i] = shared.most[i] = shared.runs[i] = 0, shared.ranges[i] = 0;
}

/// Finds what `below`, `above` and `most` are of. A thread for each element; barriers before and after it.
JLP_DEVICE void find_middles(int run, RangesShared& shared) {
  const int line = threadIdx.x / kRangesLength, k = threadIdx.x % kRangesLength, lane = threadIdx.x % 32;
  const uint32_t size = shared.sizes[line][k];
  const int first = k & ~(run - 1), middle = run / 2;
  int less = 0;
  for (int j = first; j < first + run; j += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) less += shared.sizes[line][j + i] < size;
  }
  // The largest of those that at most so many are less than.
  const uint32_t mask = run == 16 ? 0xFFFFu << (lane & 16) : 0xFFFFFFFFu;
  const uint32_t below = __reduce_max_sync(mask, less < middle ? size : 0u);
  const uint32_t above = __reduce_max_sync(mask, less <= middle ? size : 0u);
  const uint32_t most = __reduce_max_sync(mask, size);
  if (lane % run != 0 && lane != 0) return;
  const int index = threadIdx.x / run;
  atomicMax(&shared.below[index], below), atomicMax(&shared.above[index], above), atomicMax(&shared.most[index], most);
}

/// Adds the ranges of the runs that are whole, and clears for the next tile. `length`: elements from the tile's first to the
/// line's end.
JLP_DEVICE void add_ranges(int run, int64_t length, float unit, RangesShared& shared) {
  const int index = threadIdx.x, of_line = kRangesLength / run;
  if (index >= kRangesLines * of_line) return;
  const auto number = [&](uint32_t bits) { return Lanes<float>::from_bits(bits) * unit; };
  const float median = number(shared.below[index]) / 2 + number(shared.above[index]) / 2;
  if (median > 0 && (index % of_line + 1) * run <= length)
    shared.ranges[index] += number(shared.most[index]) / median, ++shared.runs[index];
  shared.below[index] = shared.above[index] = shared.most[index] = 0;
}

}  // namespace cuda
}  // namespace jaxlowprec
