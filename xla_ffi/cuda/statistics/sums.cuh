// Counts and sums of a quantisation: elements beside what their codes decode to, blocks by their scale, codes by their bin.
//
// Data flow: a tile of 32 lines by 128 elements, a line being a run of the quantised axis. A thread has eight elements of
// each of two lines: x (columnwise by way of shared memory, transposed), their codes, their scale -> decoded and compared ->
// counts in registers, sums in float32 and once a tile in double; histograms by integer atomics in shared memory, those of
// codes by lane, so that no two lanes meet. Magnitudes of every 16th line -> ranges.cuh. At the end the block's numbers, by
// shuffles of fixed order, into its part of the workspace; sums_sum_kernel adds up the parts, in theirs.
// Bytes moved per element: 2 or 4 and the code's 0.5 or 1 read, and a scale for every eight elements, of which all but the
// first come from the cache. The workspace is 2.4 KB a part.
// Launch: blocks of 256 threads, one for each part, each going through items: 32 lines (128 where a scale covers 128) by 512
// elements, or whole lines where all lines have one scale.
#pragma once

#include <type_traits>

#include "count_eight.cuh"
#include "ranges.cuh"
#include "statistics.h"

namespace jaxlowprec {
namespace cuda {

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
  uint32_t parts, groups, segments;  // of a matrix, of its lines, of a line
  int32_t group_lines;               // a multiple of a tile's
  int64_t segment_length;            // the same
  int32_t run;                       // elements whose range is taken: a block, or kRangeRun
  Covers covers;
  bool whole_x, whole_codes;  // their rows are whole eights, and aligned
};

struct SumsShared {
  CodeBins codes;
  uint32_t scales[kSumsScales];
  uint32_t used[kTileLines];  // whether a tile of blocks, or a line, has a finite element that is not zero
  RangesShared ranges;
  double of_warp[kSumsThreads / 32][kCounted];
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

/// Where a tile lies: its matrix, its first line, that line within its group, its first element.
struct SumsPlace {
  int64_t batch, line;
  int within;
  int64_t k;
};

/// A thread's part of a tile: eight elements of each of kSteps lines.
template <ElementType kType>
struct SumsTile {
  EightElements<kType> x[kSteps];
  uint32_t codes[kSteps][2], scales[kSteps];
  int count[kSteps];  // of the eight that exist

  /// Loads everything before anything is used.
  template <bool kColumnwise>
  __device__ __forceinline__ void load(const SumsArguments& a, const SumsPlace& at) {
    const int64_t lines = a.codes.rows, length = a.codes.columns;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kColumnwise) {
        const int64_t k = at.k + step * (kTileLength / kSteps) + threadIdx.x / 4, line = at.line + threadIdx.x % 4 * 8;
        x[step].load(a.x, (at.batch * length + k) * lines + line, k < length ? lines - line : 0, a.whole_x);
      } else {
        const int64_t k = at.k + threadIdx.x % kOctets * 8, line = at.line + step * kRangeEvery + threadIdx.x / kOctets;
        x[step].load(a.x, (at.batch * lines + line) * length + k, line < lines ? length - k : 0, a.whole_x);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int64_t k = at.k + threadIdx.x % kOctets * 8, line = at.line + step * kRangeEvery + threadIdx.x / kOctets;
      count[step] = line < lines ? static_cast<int>(max(min(length - k, int64_t{8}), int64_t{0})) : 0;
      codes[step][0] = codes[step][1] = scales[step] = 0;
      if (count[step] == 0) continue;
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

/// Notes that the scale of a thread's eight elements is used if any thread of its run has one that counts. `line`: of the
/// group.
JLP_DEVICE void note_use(const SumsArguments& a, bool counts, uint32_t stored, int line, SumsShared& shared) {
  const uint32_t lanes = a.run / 8, lane = threadIdx.x % 32;
  const uint32_t those = __ballot_sync(0xFFFFFFFFu, counts) >> lane & ((1u << lanes) - 1);
  if (lane % lanes != 0 || those == 0) return;
  if (a.covers == Covers::kBlock) {
    atomicAdd(&shared.scales[bin_of_scale(a.codes.scale_kind, stored)], 1u);
  } else if (a.covers == Covers::kTile) {
    const int across = kTileLength >> a.codes.column_shift, k = threadIdx.x % kOctets * 8;
    atomicOr(&shared.used[(line >> a.codes.row_shift) * across + (k >> a.codes.column_shift)], 1u);
  } else {
    atomicOr(&shared.used[line], 1u);
  }
}

/// Counts the scales of the tiles or lines that are used. All threads, after a barrier; a barrier follows.
JLP_DEVICE void count_uses(const SumsArguments& a, const SumsPlace& at, SumsShared& shared) {
  const int i = threadIdx.x;
  if (i < kTileLines && shared.used[i]) {
    const bool tile = a.covers == Covers::kTile;
    const int across = tile ? kTileLength >> a.codes.column_shift : 1;
    const int64_t line = tile ? at.line + (static_cast<int64_t>(i / across) << a.codes.row_shift) : 0;
    const int64_t k = tile ? at.k + (static_cast<int64_t>(i % across) << a.codes.column_shift) : 0;
    atomicAdd(&shared.scales[bin_of_scale(a.codes.scale_kind, scale_at(a.codes, at.batch, line, k))], 1u);
    shared.used[i] = 0;
  }
  __syncthreads();
}

template <ElementType kType, bool kColumnwise>
JLP_DEVICE void count_tile(const SumsArguments& a, const SumsPlace& at, float unit, float amax,
                           SumsSharedOf<kColumnwise>& shared, Counts& counts) {
  SumsTile<kType> tile;
  tile.template load<kColumnwise>(a, at);
  if constexpr (kColumnwise) {
    tile.transpose(shared);
    __syncthreads();
  }
  TileSums sums = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float v[8];
    tile.template elements<kColumnwise>(step, shared, v);
    if (threadIdx.x < kOctets) {
#pragma unroll
      for (int i = 0; i < 8; ++i) shared.ranges.sizes[step][threadIdx.x * 8 + i] = finite_magnitude(v[i]);
    }
    const float scale = decode_scale(a.codes.scale_kind, tile.scales[step]);
    const Decoded decoded{tile.codes[step], scale, a.codes.amax != nullptr, amax};
    const bool some = count_eight(a.code, v, decoded, tile.count[step], unit, shared.codes, counts, sums);
    note_use(a, some, tile.scales[step], at.within + step * kRangeEvery + threadIdx.x / kOctets, shared);
  }
  counts.add(sums);
  __syncthreads();
  find_middles(a.run, shared.ranges);
  __syncthreads();
  add_ranges(a.run, a.codes.columns - at.k, unit, shared.ranges, counts);
}

/// The block's numbers to its part of the workspace.
JLP_DEVICE void store_counts(const Counts& counts, SumsShared& shared, double* sums) {
  double numbers[kCounted];
  counts.get(numbers);
#pragma unroll
  for (int i = 0; i < kCounted; ++i) {
    const double of_warp = sum_of_warp(numbers[i]);
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32][i] = of_warp;
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i < kSumsScalesFrom) {
    double number = 0;
    for (int warp = 0; i < kCounted && warp < kSumsThreads / 32; ++warp) number += shared.of_warp[warp][i];
    sums[i] = number;
  }
  sums[kSumsScalesFrom + i] = shared.scales[i];
  if (i < kSumsCodes) sums[kSumsCodesFrom + i] = static_cast<double>(shared.codes.count(i));
}

template <ElementType kType, bool kColumnwise>
static __global__ void __launch_bounds__(kSumsThreads, 3) sums_kernel(const SumsArguments a) {
  static_assert(kSumsThreads == kSumsScales, "a thread has a bin of scales");
  auto& shared = block_shared<SumsSharedOf<kColumnwise>>();
  shared.codes.clear();
  shared.scales[threadIdx.x] = 0;
  if (threadIdx.x < kTileLines) shared.used[threadIdx.x] = 0;
  clear_ranges(shared.ranges);
  __syncthreads();

  const int64_t lines = a.codes.rows, length = a.codes.columns;
  SumsPlace at;
  at.batch = blockIdx.x / a.parts;
  const float unit = a.unit[at.batch], amax = a.codes.amax ? a.codes.amax[at.batch] : 0.0f;
  Counts counts = {};
  for (uint32_t item = blockIdx.x % a.parts; item < a.groups * a.segments; item += a.parts) {
    const int64_t line = static_cast<int64_t>(item / a.segments) * a.group_lines;
    const int64_t first = item % a.segments * a.segment_length, last = min(first + a.segment_length, length);
    for (at.k = first; at.k < last; at.k += kTileLength) {
      for (at.within = 0; at.within < a.group_lines && line + at.within < lines; at.within += kTileLines) {
        at.line = line + at.within;
        count_tile<kType, kColumnwise>(a, at, unit, amax, shared, counts);
      }
      at.line = line;
      if (a.covers == Covers::kTile) count_uses(a, at, shared);
    }
    if (a.covers == Covers::kTensor) count_uses(a, at, shared);
  }
  store_counts(counts, shared, a.found[blockIdx.x].sums);
}

constexpr int kSumsTogether = 32;  // numbers that a block adds up over the parts
struct PartsShared {
  double sums[kSumsThreads / kSumsTogether][kSumsTogether];
};

/// Adds up the parts of a matrix. Block (x, y): numbers of the x-th 32, matrix y.
static __global__ void __launch_bounds__(kSumsThreads) sums_sum_kernel(const SumsArguments a) {
  constexpr int kApart = kSumsThreads / kSumsTogether;
  constexpr uint32_t kBlocks = (kSums + kSumsTogether - 1) / kSumsTogether;
  PartsShared& shared = block_shared<PartsShared>();
  const int64_t batch = blockIdx.x / kBlocks;
  const int place = threadIdx.x % kSumsTogether, number = blockIdx.x % kBlocks * kSumsTogether + place;
  double sum = 0;
  for (uint32_t part = threadIdx.x / kSumsTogether; number < kSums && part < a.parts; part += kApart)
    sum += a.found[batch * a.parts + part].sums[number];
  shared.sums[threadIdx.x / kSumsTogether][place] = sum;
  __syncthreads();
  if (threadIdx.x >= kSumsTogether || number >= kSums) return;
  for (int i = 1; i < kApart; ++i) sum += shared.sums[i][place];
  a.result[batch * kSums + number] = static_cast<float>(sum);
}

}  // namespace cuda
}  // namespace jaxlowprec
