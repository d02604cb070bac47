// A tile of the counting of a quantisation, 32 lines by 128 elements, as a block's threads hold it: what they load, and what
// they share. sums.cuh says what becomes of it.
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
