// A tile of the counting of a quantisation, 32 lines by 128 elements, as a block's threads hold it: what they load, and what
// they share. sums.cu says what becomes of it.
#pragma once

#include <type_traits>

#include "../dequantize.cuh"
#include "elements.cuh"
#include "statistics.h"

namespace jaxlowprec {
namespace cuda {

// The range of a run of elements: its largest over its median magnitude. Of the 32 lines of a tile two have theirs taken.
//
// Data flow: magnitudes of 2 lines by 128 elements in shared memory -> each thread counts how many of its element's run are
// less -> the two in the middle, and the largest, by maxima over the run -> a thread for each run adds its range.

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

// Eight elements beside what their codes decode to: a thread's counts and sums, and the block's histogram of codes.

/// Sums of a few elements, in float32.
struct TileSums {
  float error, magnitude, square_error, energy;
};

/// The sums of every thread of a block, in shared memory: registers are few.
template <int kThreads>
struct ThreadSums {
  static constexpr int kNumbers = 4;
  double numbers[kNumbers][kThreads];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i][threadIdx.x] = 0;
  }
  __device__ __forceinline__ void add(const TileSums& sums) {
    const float tile[kNumbers] = {sums.error, sums.magnitude, sums.square_error, sums.energy};
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i][threadIdx.x] += tile[i];
  }
};

/// A thread's counts but those of elements, which are as many as codes. None reaches 2^32: that would be more than 2^40
/// elements in a block's hands.
struct Counts {
  uint32_t zeros, underflow, saturation, nonfinite, poisoned;
};

/// A histogram in shared memory: every lane has a bank of its own, which the block's warps add to by turns.
struct CodeBins {
  uint32_t counts[kSumsCodes][32];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kSumsCodes * 32; i += blockDim.x) counts[i / 32][i % 32] = 0;
  }
  __device__ __forceinline__ void add(uint32_t bin) { atomicAdd(&counts[bin][threadIdx.x % 32], 1u); }
  __device__ __forceinline__ uint64_t count(int bin) const {
    uint64_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += counts[bin][(i + bin) % 32];
    return sum;
  }
};

/// Eight codes and what makes numbers of them.
struct Decoded {
  const uint32_t (&codes)[2];
  float scale;
  bool two_level;
  float amax;  // of two-level formats
};

/// The first `count` of eight elements; the others are zeros. Whether one of them is finite and not zero.
template <class Element>
JLP_DEVICE bool count_eight_of(const float (&x)[8], const Decoded& decoded, int count, float unit, CodeBins& bins,
                               Counts& counts, TileSums& sums) {
  EightCodes<Element> codes;
#pragma unroll
  for (int i = 0; i < EightCodes<Element>::kWords; ++i) codes.words[i] = decoded.codes[i];
  float d[8];
  codes.decode(d);
  if constexpr (Element::kPacked) {
    if (decoded.two_level)
      apply_scale<Decoding::kTwoLevel>(d, decoded.scale, decoded.amax);
    else
      apply_scale<Decoding::kProduct>(d, decoded.scale, 0.0f);
  } else {
    apply_scale<Decoding::kProduct>(d, decoded.scale, 0.0f);
  }
  bool some = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = Element::kPacked ? codes.words[0] >> (4 * i) & 0xFu : decoded.codes[i / 4] >> (i % 4 * 8) & 0xFFu;
    const uint32_t magnitude_code = code & (Element::kPacked ? 7u : 0x7Fu);
    const uint32_t bits = magnitude(x[i]), size = bits < kMinNormalBits ? 0u : bits;
    const uint32_t size_decoded = i < count ? magnitude(d[i]) : 0u;  // a poisoned block's padding is no element
    const bool finite = size < kInfinityBits, decodes = size_decoded < kInfinityBits, known = finite && decodes;
    const float kept = known ? x[i] * unit : 0.0f, off = known && i < count ? d[i] * unit - kept : 0.0f;
    counts.zeros += size == 0;
    counts.underflow += size != 0 && size_decoded == 0;
    counts.saturation += known && size_decoded != 0 && size > size_decoded && magnitude_code == Element::kLargestCode;
    counts.nonfinite += !finite;
    counts.poisoned += finite && !decodes;
    sums.error += off, sums.magnitude += absolute(kept);
    sums.square_error += off * off, sums.energy += kept * kept;
    some |= finite && size != 0;
    if (i < count) bins.add(Element::kPacked ? code : magnitude_code >> Element::kMantissaBits);
  }
  counts.zeros -= 8 - count;
  return some;
}

JLP_DEVICE bool count_eight(CodeType code, const float (&x)[8], const Decoded& decoded, int count, float unit,
                            CodeBins& bins, Counts& counts, TileSums& sums) {
#define JLP_CASE(Type) \
  case CodeType::k##Type: return count_eight_of<Type>(x, decoded, count, unit, bins, counts, sums);
  switch (code) {
    JLP_CASE(E2M1)
    JLP_FLOAT8_TYPES(JLP_CASE)
    default: return false;  // launches admit no other code
  }
#undef JLP_CASE
}

constexpr int kSumsThreads = 256;
constexpr int kTileLines = 32, kTileLength = kRangesLength, kOctets = kTileLength / 8,
              kSteps = kTileLines * kOctets / kSumsThreads;
constexpr int kSumsSegment = 512;
static_assert(kRangeEvery == kTileLines / kSteps, "the first line of each step has its ranges taken");

/// What a scale covers, and so when it counts as used.
enum class Covers : int32_t { kBlock, kTile, kTensor };

struct SumsArguments {
  DequantizeArguments codes;  // a row is a line
  CodeType code;
  const void* x;
  const float* unit;
  SumsOfPart* found;
  float* result;
  uint32_t parts, groups, segments;     // of a matrix, of its lines, of a line
  uint32_t group_tiles, segment_tiles;  // of a group, of a segment
  uint32_t tiles_down, tiles_across;    // of a matrix
  int32_t run;                          // elements whose range is taken: a block, or kRangeRun
  Covers covers;
  bool whole_x, whole_codes;  // their rows are whole eights, and aligned
};

/// Numbers of a warp, in the order of the reference: zeros to poisoned, error to energy.
constexpr int kWarpNumbers = 9;

struct SumsShared {
  CodeBins codes;
  uint32_t scales[kSumsScales];
  uint32_t used[kTileLines];  // whether a tile of blocks, or a line, has a finite element that is not zero
  RangesShared ranges;
  ThreadSums<kSumsThreads> sums;
  double of_warp[kSumsThreads / 32][kWarpNumbers];
};
struct SumsColumnsShared : SumsShared {
  // A step of 5 banks from line to line and one more every 32 elements: neither the writes, of eight lines each by four
  // lanes, nor the reads, of eight elements each by sixteen, meet in a bank more than twice.
  static constexpr int kStride = kTileLength + 5;
  float x[kTileLines * kStride];
  static __device__ __forceinline__ int place(int line, int k) { return line * kStride + k + k / 32; }
};
template <bool kColumnwise>
using SumsSharedOf = std::conditional_t<kColumnwise, SumsColumnsShared, SumsShared>;

/// The bin of a scale as load_scale gives it.
JLP_DEVICE uint32_t bin_of_scale(ScaleKind kind, uint32_t stored) {
  return kind == ScaleKind::kFloat32 ? stored >> 23 & 0xFFu : stored;
}
JLP_DEVICE uint32_t scale_at(const DequantizeArguments& a, int64_t batch, int64_t line, int64_t k) {
  return load_scale(a.scale_kind, a.scale,
                    (batch * a.scale_rows + (line >> a.row_shift)) * a.scale_stride + (k >> a.column_shift));
}

/// Where a tile lies: its matrix, and the number of its lines' tile and of its elements'. Elements have 64-bit numbers,
/// which would take registers from one tile to the next.
struct SumsPlace {
  uint32_t batch, down, across;

  __device__ __forceinline__ int64_t line() const { return static_cast<int64_t>(down) * kTileLines; }
  __device__ __forceinline__ int64_t k() const { return static_cast<int64_t>(across) * kTileLength; }
};

/// A thread's part of a tile: eight elements of each of kSteps lines.
template <ElementType kType>
struct SumsTile {
  EightElements<kType> x[kSteps];
  uint32_t codes[kSteps][2], scales[kSteps];

  /// How many of a step's eight exist.
  static __device__ __forceinline__ int count(const SumsArguments& a, const SumsPlace& at, int step) {
    const int64_t length = a.codes.columns - at.k() - threadIdx.x % kOctets * 8;
    const bool line = at.line() + step * kRangeEvery + threadIdx.x / kOctets < a.codes.rows;
    return line ? static_cast<int>(max(min(length, int64_t{8}), int64_t{0})) : 0;
  }

  /// Loads everything before anything is used.
  template <bool kColumnwise>
  __device__ __forceinline__ void load(const SumsArguments& a, const SumsPlace& at) {
    const int64_t lines = a.codes.rows, length = a.codes.columns;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kColumnwise) {
        const int64_t k = at.k() + step * (kTileLength / kSteps) + threadIdx.x / 4, line = at.line() + threadIdx.x % 4 * 8;
        x[step].load(a.x, (at.batch * length + k) * lines + line, k < length ? lines - line : 0, a.whole_x);
      } else {
        const int64_t k = at.k() + threadIdx.x % kOctets * 8, line = at.line() + step * kRangeEvery + threadIdx.x / kOctets;
        x[step].load(a.x, (at.batch * lines + line) * length + k, line < lines ? length - k : 0, a.whole_x);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t k = at.k() + threadIdx.x % kOctets * 8, line = at.line() + step * kRangeEvery + threadIdx.x / kOctets;
      codes[step][0] = codes[step][1] = scales[step] = 0;
      if (count(a, at, step) == 0) continue;
      const uint8_t* row = a.codes.data + (at.batch * lines + line) * a.codes.row_bytes;
      if (a.code == CodeType::kE2M1) {
        codes[step][0] = load_codes<E2M1, true>(a.codes, row, k).words[0];
      } else {
        const auto eight =
            a.whole_codes ? load_codes<E4M3, true>(a.codes, row, k) : load_codes<E4M3, false>(a.codes, row, k);
        codes[step][0] = eight.words[0], codes[step][1] = eight.words[1];
      }
      scales[step] = scale_at(a.codes, at.batch, line, k);
    }
  }

  /// The elements of a step's line as numbers; columnwise they come out of shared memory.
  template <bool kColumnwise>
  __device__ __forceinline__ void elements(int step, const SumsSharedOf<kColumnwise>& shared, float (&v)[8]) const {
    if constexpr (kColumnwise) {
      const int line = step * kRangeEvery + threadIdx.x / kOctets, k = threadIdx.x % kOctets * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = shared.x[SumsColumnsShared::place(line, k + i)];
    } else {
      x[step].decode(v);
    }
  }

  __device__ __forceinline__ void transpose(SumsColumnsShared& shared) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = step * (kTileLength / kSteps) + threadIdx.x / 4, line = threadIdx.x % 4 * 8;
      float v[8];
      x[step].decode(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) shared.x[SumsColumnsShared::place(line + i, k)] = v[i];
    }
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
