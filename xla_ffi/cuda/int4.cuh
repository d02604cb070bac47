// Int4 (int4_qat.md 1.4): elements to their decoded values in one pass, to packed codes, and back.
//
//   symmetric rows: a thread takes sixteen elements, in pairs of the deployment dtype; groups of 32, 64 and 128
//   rows: a thread takes eight elements, a power of two of lanes a group: extremes by shuffles, then each lane its elements
//   columns: a block takes 128 rows by 64 columns, a thread four rows of eight columns, kept in registers: extremes by
//     shuffles and shared memory; codes are transposed in shared memory into 64 bytes of each column's line
//   any: a warp takes two groups, which fill whole bytes, and reads their elements twice, one at a time: groups of any
//     size, padded lines, any alignment
//
// Bytes moved per element by rows and columns: fake-quantise: read and written once; quantise: read once and half a byte
// written; dequantise the reverse; with them two bytes (asymmetric: three) a group. Accesses of elements are of 16 bytes.
// Launch: blocks of 256 threads. Rows: 256 / lanes * kInt4Steps groups a block; symmetric rows: as many as the
// device holds at once, which share pieces of 256 * kInt4Sixteens sixteens.
#pragma once

#include <type_traits>

#include "../numerics/int4.h"
#include "quantize/tile_elements.cuh"
#include "vectors.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kInt4Threads = 256;
constexpr int kInt4Steps = 4;     // groups in flight a thread
constexpr int kInt4Sixteens = 2;  // of symmetric rows
constexpr int kInt4TileRows = 128, kInt4TileColumns = 64;

struct Int4Arguments {
  const void* x;  // elements, or null
  void* result;   // decoded elements, or null
  uint8_t* data;
  uint16_t* scale;
  uint8_t* zero;  // null where symmetric
  Int4Matrices m;
  int64_t length, groups, line_bytes;  // of a line
  int64_t all_lines, all_elements;
  int64_t all_groups;                // of all lines
  int32_t lane_shift;                // rows: log2 of the lanes a group
  uint32_t row_tiles, column_tiles;  // columns: of a matrix
};

template <ElementType kDeploy>
using Int4Deploy = std::conditional_t<kDeploy == ElementType::kF16, Int4F16, Int4BF16>;

/// Eight elements, as in memory.
template <ElementType kType>
struct Int4Eight {
  static constexpr int kWords = 8 / kPerWord<kType>;
  uint32_t words[kWords];
};

template <ElementType kType>
JLP_DEVICE Int4Eight<kType> load_eight(const void* from, int64_t index) {
  const auto* pieces = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(from) + index * kElementBytes<kType>);
  Int4Eight<kType> eight;
#pragma unroll
  for (int i = 0; i < Int4Eight<kType>::kWords / 4; ++i) {
    const uint4 piece = __ldg(pieces + i);
    eight.words[4 * i] = piece.x, eight.words[4 * i + 1] = piece.y;
    eight.words[4 * i + 2] = piece.z, eight.words[4 * i + 3] = piece.w;
  }
  return eight;
}

/// Two numbers rounded to the deployment dtype, widened again.
template <ElementType kDeploy>
JLP_DEVICE void round_two(float (&v)[2]) {
  const uint32_t word = narrow<kDeploy>(v);
  widen<kDeploy>(word, v);
}

/// Numbers of the deployment dtype that elements are rounded to.
template <ElementType kType, ElementType kDeploy>
JLP_DEVICE void deployed(const Int4Eight<kType>& eight, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += kPerWord<kType>) widen<kType>(eight.words[i / kPerWord<kType>], &v[i]);
  if constexpr (kType != kDeploy) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float two[2] = {v[i], v[i + 1]};
      round_two<kDeploy>(two);
      v[i] = two[0], v[i + 1] = two[1];
    }
  }
}

template <ElementType kType, ElementType kDeploy>
JLP_DEVICE float deployed_one(const void* x, int64_t index) {
  uint32_t word;
  if constexpr (kType == ElementType::kF32)
    word = static_cast<const uint32_t*>(x)[index];
  else
    word = static_cast<const uint16_t*>(x)[index];
  float two[2] = {};
  widen<kType>(word, two);
  two[1] = 0.0f;
  if constexpr (kType != kDeploy) round_two<kDeploy>(two);
  return two[0];
}

/// The largest elements of either sign as bits without it; 0 where there is none.
struct Int4Extremes {
  int32_t positive, negative;
};

JLP_DEVICE void extend(Int4Extremes& e, float x) {
  const uint32_t bits = Lanes<float>::bits(x);
  e.positive = max(e.positive, static_cast<int32_t>(bits));  // negative numbers are negative integers
  e.negative = max(e.negative, static_cast<int32_t>(bits ^ kSignBit));
}
JLP_DEVICE void extend(Int4Extremes& e, const Int4Extremes& other) {
  e.positive = max(e.positive, other.positive), e.negative = max(e.negative, other.negative);
}
JLP_DEVICE Int4Extremes of_lane(const Int4Extremes& e, int distance) {
  return {__shfl_xor_sync(0xFFFFFFFFu, e.positive, distance), __shfl_xor_sync(0xFFFFFFFFu, e.negative, distance)};
}

template <ElementType kDeploy>
JLP_DEVICE Int4Group<float> int4_group_of(const Int4Extremes& e, bool symmetric) {
  const uint32_t positive = static_cast<uint32_t>(e.positive), negative = static_cast<uint32_t>(e.negative);
  if (symmetric) return int4_symmetric<float, Int4Deploy<kDeploy>>(positive > negative ? positive : negative);
  return int4_asymmetric<float, Int4Deploy<kDeploy>>(positive, negative);
}

/// Scale and zero point of a group to their places.
template <ElementType kDeploy>
JLP_DEVICE void store_group(const Int4Arguments& a, int64_t index, const Int4Group<float>& g) {
  a.scale[index] = static_cast<uint16_t>(int4_scale_bits<float, Int4Deploy<kDeploy>>(g.scale));
  if (a.zero) a.zero[index] = static_cast<uint8_t>(g.zero);
}

JLP_DEVICE uint32_t code_of(float x, const Int4Group<float>& g) {
  const uint32_t code = int4_encode<float, false>(x, g) & 15u;
  return g.scale != g.scale ? g.zero : code;
}

/// Two decoded numbers, not rounded yet, as a word or two of the result: by way of the deployment dtype.
template <ElementType kResult, ElementType kDeploy>
JLP_DEVICE void result_words(float first, float second, bool bad_first, bool bad_second, uint32_t* words) {
  float two[2] = {first, second};
  if constexpr (kResult != kDeploy) round_two<kDeploy>(two);
  if constexpr (kResult == ElementType::kF32) {
    words[0] = bad_first ? kNaNBits : Lanes<float>::bits(two[0]);
    words[1] = bad_second ? kNaNBits : Lanes<float>::bits(two[1]);
  } else {
    constexpr uint32_t kNaN = Int4Deploy<kResult>::kNaN;
    const uint32_t both = narrow<kResult>(two);
    words[0] = (bad_first ? kNaN : both & 0xFFFFu) | (bad_second ? kNaN << 16 : both & 0xFFFF0000u);
  }
}

/// Eight of them to elements `index` ... of the result. Bit i of `bad`: the i-th is NaN.
template <ElementType kResult, ElementType kDeploy>
JLP_DEVICE void store_result(void* to, int64_t index, const float (&v)[8], uint32_t bad) {
  constexpr int kWords = 8 / kPerWord<kResult>;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    result_words<kResult, kDeploy>(v[i], v[i + 1], bad >> i & 1u, bad >> (i + 1) & 1u, &words[i / kPerWord<kResult>]);
  auto* pieces = reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + index * kElementBytes<kResult>);
#pragma unroll
  for (int i = 0; i < kWords; i += 4) pieces[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

/// Eight of one group. `bad`: all of them are NaN.
template <ElementType kResult, ElementType kDeploy>
JLP_DEVICE void store_result_of_group(void* to, int64_t index, const float (&v)[8], bool bad) {
  constexpr int kWords = 8 / kPerWord<kResult>;
  constexpr uint32_t kNaN = kResult == ElementType::kF32 ? kNaNBits : Int4Deploy<kResult>::kNaN * 0x10001u;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    float two[2] = {v[i], v[i + 1]};
    if constexpr (kResult != kDeploy) round_two<kDeploy>(two);
#pragma unroll
    for (int k = 0; k < 2; k += kPerWord<kResult>) words[(i + k) / kPerWord<kResult>] = narrow<kResult>(&two[k]);
  }
  auto* pieces = reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + index * kElementBytes<kResult>);
#pragma unroll
  for (int i = 0; i < kWords; i += 4)
    pieces[i / 4] =
        bad ? make_uint4(kNaN, kNaN, kNaN, kNaN) : make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

template <ElementType kResult, ElementType kDeploy>
JLP_DEVICE void store_one_result(void* to, int64_t index, float value, bool bad) {
  uint32_t words[2];
  result_words<kResult, kDeploy>(value, 0.0f, bad, false, words);
  if constexpr (kResult == ElementType::kF32)
    static_cast<uint32_t*>(to)[index] = words[0];
  else
    static_cast<uint16_t*>(to)[index] = static_cast<uint16_t>(words[0]);
}

/// The decoded value, before it is rounded.
JLP_DEVICE float fake_of(float x, const Int4Group<float>& g) {
  return (int4_steps<float, false>(x, g) - kInt4Integers) * g.scale;
}

// --- symmetric rows

/// Sixteen elements as pairs of the deployment dtype.
template <ElementType kType, ElementType kDeploy>
JLP_DEVICE void deployed_pairs(const Int4Eight<kType> (&eights)[2], uint32_t (&words)[8]) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const Int4Eight<kType>& eight = eights[i / 8];
    if constexpr (kType == kDeploy) {
      words[i / 2] = eight.words[i % 8 / 2];
    } else {
      float two[2];
#pragma unroll
      for (int k = 0; k < 2; k += kPerWord<kType>) widen<kType>(eight.words[(i % 8 + k) / kPerWord<kType>], &two[k]);
      words[i / 2] = narrow<kDeploy>(two);
    }
  }
}

/// Sixteens `first`, first + 256, ... of a thread: codes if kQuantize, else decoded values. A group is 16 * kLanes elements.
template <ElementType kType, ElementType kDeploy, int kLanes, bool kQuantize>
JLP_DEVICE void int4_symmetric_sixteens(const Int4Arguments& a, uint32_t first, uint32_t sixteens) {
  using Pair = std::conditional_t<kDeploy == ElementType::kF16, F16, BF16>;
  Int4Eight<kType> eights[kInt4Sixteens][2] = {};
#pragma unroll
  for (int step = 0; step < kInt4Sixteens; ++step) {
    const uint32_t at = first + step * kInt4Threads;
    if (at >= sixteens) continue;
    eights[step][0] = load_eight<kType>(a.x, int64_t{at} * 16);
    eights[step][1] = load_eight<kType>(a.x, int64_t{at} * 16 + 8);
  }
#pragma unroll
  for (int step = 0; step < kInt4Sixteens; ++step) {
    const uint32_t at = first + step * kInt4Threads;
    uint32_t words[8];
    deployed_pairs<kType, kDeploy>(eights[step], words);
    uint32_t amax = magnitude_bits<Pair>(words);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
    if (at >= sixteens) continue;
    const float step_and_zero[2] = {fmaxf(as_float(amax) * (1.0f / 7.0f), kInt4LeastScale), 0.0f};
    const uint32_t stored = narrow<kDeploy>(step_and_zero);
    const bool bad = amax >= kInfinityBits || stored >= Pair::kInfinity >> 16;
    const float scale = Pair::low(stored), inverse = near_reciprocal(scale);
    const auto value = [&](int i) { return i % 2 ? Pair::high(words[i / 2]) : Pair::low(words[i / 2]); };
    if constexpr (kQuantize) {
      uint32_t codes[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 7; i >= 0; --i)
          codes[h] = codes[h] * 16u + as_bits(int4_nearest(value(8 * h + i), inverse, static_cast<int>(kInt4Middle)));
        codes[h] = bad ? kInt4Middle * 0x11111111u : codes[h] - kInt4IntegersBits * 0x11111111u;
      }
      reinterpret_cast<uint2*>(a.data)[at] = make_uint2(codes[0], codes[1]);
      if (threadIdx.x % kLanes == 0) a.scale[at / kLanes] = static_cast<uint16_t>(bad ? Int4Deploy<kDeploy>::kNaN : stored);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = (int4_nearest(value(8 * h + i), inverse) - kInt4Integers) * scale;
        store_result_of_group<kType, kDeploy>(a.result, int64_t{at} * 16 + 8 * h, v, bad);
      }
    }
  }
}

template <ElementType kType, ElementType kDeploy, int kLanes, bool kQuantize>
static __global__ void __launch_bounds__(kInt4Threads, kType == ElementType::kF32 ? 4 : 5)
    int4_symmetric_rows(const Int4Arguments a) {
  constexpr uint32_t kPiece = kInt4Threads * kInt4Sixteens;
  const uint32_t sixteens = static_cast<uint32_t>(a.all_groups) * kLanes;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kPiece + threadIdx.x; first - threadIdx.x < sixteens; first += gridDim.x * kPiece)
    int4_symmetric_sixteens<kType, kDeploy, kLanes, kQuantize>(a, first, sixteens);
}

// --- rows

/// kQuantize: codes; else decoded values.
template <ElementType kType, ElementType kDeploy, bool kQuantize>
static __global__ void __launch_bounds__(kInt4Threads) int4_rows(const Int4Arguments a) {
  const int lane = threadIdx.x & ((1 << a.lane_shift) - 1), each = kInt4Threads >> a.lane_shift;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (each * kInt4Steps) + (threadIdx.x >> a.lane_shift);
  const bool active = lane * 8 < a.m.format.group;
  Int4Eight<kType> eight[kInt4Steps] = {};
#pragma unroll
  for (int step = 0; step < kInt4Steps; ++step) {
    const int64_t index = first + step * each;
    if (active && index < a.all_groups) eight[step] = load_eight<kType>(a.x, index * a.m.format.group + lane * 8);
  }
#pragma unroll
  for (int step = 0; step < kInt4Steps; ++step) {
    const int64_t index = first + step * each, at = index * a.m.format.group + lane * 8;
    float v[8];
    deployed<kType, kDeploy>(eight[step], v);
    Int4Extremes extremes = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) extend(extremes, v[i]);
    for (int distance = 1 << a.lane_shift >> 1; distance > 0; distance /= 2) extend(extremes, of_lane(extremes, distance));
    const Int4Group<float> g = int4_group_of<kDeploy>(extremes, a.m.format.symmetric);
    if (!active || index >= a.all_groups) continue;
    if constexpr (kQuantize) {
      uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) codes |= code_of(v[i], g) << (4 * i);
      *reinterpret_cast<uint32_t*>(a.data + at / 2) = codes;
      if (lane == 0) store_group<kDeploy>(a, index, g);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = fake_of(v[i], g);
      store_result_of_group<kType, kDeploy>(a.result, at, v, g.scale != g.scale);
    }
  }
}

template <ElementType kResult, ElementType kDeploy>
static __global__ void __launch_bounds__(kInt4Threads) int4_decode_rows(const Int4Arguments a) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kInt4Threads * kInt4Steps) + threadIdx.x;
  const int64_t eights = a.all_groups * a.m.format.group / 8;
  uint32_t codes[kInt4Steps] = {}, scales[kInt4Steps] = {}, zeros[kInt4Steps];
#pragma unroll
  for (int step = 0; step < kInt4Steps; ++step) {
    const int64_t at = first + step * kInt4Threads, group = at * 8 / a.m.format.group;
    zeros[step] = kInt4Middle;
    if (at >= eights) continue;
    codes[step] = __ldg(reinterpret_cast<const uint32_t*>(a.data) + at);
    scales[step] = a.scale[group];
    if (a.zero) zeros[step] = a.zero[group];
  }
#pragma unroll
  for (int step = 0; step < kInt4Steps; ++step) {
    const int64_t at = first + step * kInt4Threads;
    if (at >= eights) continue;
    const float scale = int4_decode_scale<float, Int4Deploy<kDeploy>>(scales[step]);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = static_cast<float>(static_cast<int>((codes[step] >> (4 * i)) & 15u) - static_cast<int>(zeros[step])) * scale;
    store_result_of_group<kResult, kDeploy>(a.result, at * 8, v, scale != scale);
  }
}

// --- columns

struct Int4TileGroup {
  float scale, inverse, most;
  uint32_t zero;
};

struct Int4TileShared {
  Int4Extremes extremes[kInt4Threads / 32][kInt4TileColumns];
  Int4TileGroup groups[kInt4TileRows / 32][kInt4TileColumns];
  alignas(16) uint8_t codes[kInt4TileColumns][kInt4TileRows / 2 + 16];  // 16 more: fewer columns in one bank
};

/// Where a thread works: rows `row` to row + 3 and columns `column` to column + 7 of a matrix.
struct Int4TilePlace {
  int64_t batch, first_row, first_column, row, column;
  int line, piece;  // of 32 lines of four rows, of 8 pieces of eight columns
};

JLP_DEVICE Int4TilePlace tile_place(const Int4Arguments& a) {
  const uint32_t across = blockIdx.x % a.column_tiles, rest = blockIdx.x / a.column_tiles;
  Int4TilePlace at;
  at.batch = rest / a.row_tiles;
  at.first_row = static_cast<int64_t>(rest % a.row_tiles) * kInt4TileRows;
  at.first_column = static_cast<int64_t>(across) * kInt4TileColumns;
  at.line = threadIdx.x / 8, at.piece = threadIdx.x % 8;
  at.row = at.first_row + at.line * 4, at.column = at.first_column + at.piece * 8;
  return at;
}

/// The group of the tile and column that a thread computes the scale of; -1: none.
JLP_DEVICE int64_t tile_group(const Int4Arguments& a, const Int4TilePlace& at, int group, int column) {
  const int64_t row = at.first_row + static_cast<int64_t>(group) * a.m.format.group;
  if (group * a.m.format.group >= kInt4TileRows || row >= a.m.rows || at.first_column + column >= a.m.columns) return -1;
  return (at.batch * a.m.columns + at.first_column + column) * a.groups + row / a.m.format.group;
}

/// Scales of all groups of a tile, from four rows of eight columns a thread.
template <ElementType kType, ElementType kDeploy, bool kQuantize>
JLP_DEVICE void tile_groups(const Int4Arguments& a, const Int4TilePlace& at, const Int4Eight<kType> (&eight)[4],
                            Int4TileShared& shared) {
  Int4Extremes extremes[8] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float v[8];
    deployed<kType, kDeploy>(eight[r], v);
#pragma unroll
    for (int i = 0; i < 8; ++i) extend(extremes[i], v[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // a warp has four lines of the same columns
    extend(extremes[i], of_lane(extremes[i], 8));
    extend(extremes[i], of_lane(extremes[i], 16));
    if (threadIdx.x % 32 < 8) shared.extremes[threadIdx.x / 32][at.piece * 8 + i] = extremes[i];
  }
  __syncthreads();
  const int group = threadIdx.x / kInt4TileColumns, column = threadIdx.x % kInt4TileColumns;
  const int64_t index = tile_group(a, at, group, column);
  if (index >= 0) {
    const int warps = static_cast<int>(a.m.format.group) / 16;
    Int4Extremes all = {};
    for (int w = group * warps; w < (group + 1) * warps; ++w) extend(all, shared.extremes[w][column]);
    const Int4Group<float> g = int4_group_of<kDeploy>(all, a.m.format.symmetric);
    shared.groups[group][column] = {g.scale, g.inverse, g.most, g.zero};
    if constexpr (kQuantize) store_group<kDeploy>(a, index, g);
  }
  __syncthreads();
}

template <ElementType kType, ElementType kDeploy, bool kQuantize>
static __global__ void __launch_bounds__(kInt4Threads, 3) int4_columns(const Int4Arguments a) {
  Int4TileShared& shared = block_shared<Int4TileShared>();
  const Int4TilePlace at = tile_place(a);
  const int64_t first = (at.batch * a.m.rows + at.row) * a.m.columns + at.column;
  const bool inside = at.row < a.m.rows && at.column < a.m.columns;  // groups are whole, and columns whole eights
  Int4Eight<kType> eight[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r)
    if (inside) eight[r] = load_eight<kType>(a.x, first + r * a.m.columns);
  tile_groups<kType, kDeploy, kQuantize>(a, at, eight, shared);
  const int group = at.line * 4 / static_cast<int>(a.m.format.group);
  if (inside) {
    float v[4][8];
#pragma unroll
    for (int r = 0; r < 4; ++r) deployed<kType, kDeploy>(eight[r], v[r]);
    uint32_t bad = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Int4TileGroup& t = shared.groups[group][at.piece * 8 + i];
      const Int4Group<float> g = {t.scale, t.inverse, t.zero, t.most};
      bad |= static_cast<uint32_t>(g.scale != g.scale) << i;
      if constexpr (kQuantize) {
        const uint32_t codes =
            code_of(v[0][i], g) | code_of(v[1][i], g) << 4 | code_of(v[2][i], g) << 8 | code_of(v[3][i], g) << 12;
        *reinterpret_cast<uint16_t*>(&shared.codes[at.piece * 8 + i][at.line * 2]) = static_cast<uint16_t>(codes);
      } else {
#pragma unroll
        for (int r = 0; r < 4; ++r) v[r][i] = fake_of(v[r][i], g);
      }
    }
    if constexpr (!kQuantize) {
#pragma unroll
      for (int r = 0; r < 4; ++r) store_result<kType, kDeploy>(a.result, first + r * a.m.columns, v[r], bad);
    }
  }
  if constexpr (kQuantize) {
    __syncthreads();
    const int column = threadIdx.x / 4, piece = threadIdx.x % 4;  // 16 bytes: 32 rows
    if (at.first_column + column < a.m.columns && at.first_row + piece * 32 < a.m.rows) {
      const int64_t line = at.batch * a.m.columns + at.first_column + column;
      *reinterpret_cast<uint4*>(a.data + line * a.line_bytes + at.first_row / 2 + piece * 16) =
          *reinterpret_cast<const uint4*>(&shared.codes[column][piece * 16]);
    }
  }
}

template <ElementType kResult, ElementType kDeploy>
static __global__ void __launch_bounds__(kInt4Threads) int4_decode_columns(const Int4Arguments a) {
  Int4TileShared& shared = block_shared<Int4TileShared>();
  const Int4TilePlace at = tile_place(a);
  const int column = threadIdx.x / 4, piece = threadIdx.x % 4;
  if (at.first_column + column < a.m.columns && at.first_row + piece * 32 < a.m.rows) {
    const int64_t line = at.batch * a.m.columns + at.first_column + column;
    *reinterpret_cast<uint4*>(&shared.codes[column][piece * 16]) =
        __ldg(reinterpret_cast<const uint4*>(a.data + line * a.line_bytes + at.first_row / 2 + piece * 16));
  }
  const int64_t index = tile_group(a, at, threadIdx.x / kInt4TileColumns, threadIdx.x % kInt4TileColumns);
  if (index >= 0) {
    const float scale = int4_decode_scale<float, Int4Deploy<kDeploy>>(a.scale[index]);
    shared.groups[threadIdx.x / kInt4TileColumns][threadIdx.x % kInt4TileColumns] = {scale, 0.0f, 0.0f,
                                                                                     a.zero ? a.zero[index] : kInt4Middle};
  }
  __syncthreads();
  if (at.row >= a.m.rows || at.column >= a.m.columns) return;
  const int group = at.line * 4 / static_cast<int>(a.m.format.group);
  float v[4][8];
  uint32_t bad = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Int4TileGroup& g = shared.groups[group][at.piece * 8 + i];
    const uint32_t codes = *reinterpret_cast<const uint16_t*>(&shared.codes[at.piece * 8 + i][at.line * 2]);
    bad |= static_cast<uint32_t>(g.scale != g.scale) << i;
#pragma unroll
    for (int r = 0; r < 4; ++r)
      v[r][i] = static_cast<float>(static_cast<int>((codes >> (4 * r)) & 15u) - static_cast<int>(g.zero)) * g.scale;
  }
#pragma unroll
  for (int r = 0; r < 4; ++r)
    store_result<kResult, kDeploy>(a.result, (at.batch * a.m.rows + at.row + r) * a.m.columns + at.column, v[r], bad);
}

// --- any

/// Where a line's elements lie.
struct Int4Line {
  int64_t first, step;

  __device__ __forceinline__ Int4Line(const Int4Matrices& m, int64_t line) : first(line * m.columns), step(1) {
    if (!m.columnwise) return;
    const int64_t batch = line / m.columns;
    first = batch * m.rows * m.columns + (line - batch * m.columns), step = m.columns;
  }
  __device__ __forceinline__ int64_t at(int64_t k) const { return first + k * step; }
};

/// One of two; not by its address, which registers have none of.
JLP_DEVICE Int4Group<float> select(bool second, const Int4Group<float>& a, const Int4Group<float>& b) {
  return {second ? b.scale : a.scale, second ? b.inverse : a.inverse, second ? b.zero : a.zero, second ? b.most : a.most};
}

template <ElementType kType, ElementType kDeploy, bool kQuantize>
static __global__ void __launch_bounds__(kInt4Threads) int4_any(const Int4Arguments a) {
  const int64_t pairs = (a.groups + 1) / 2, size = a.m.format.group, length = a.length;
  const int64_t pair = (static_cast<int64_t>(blockIdx.x) * kInt4Threads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const int64_t line = pair / pairs, first = pair % pairs * 2;
  if (line >= a.all_lines) return;
  const int count = first + 1 < a.groups ? 2 : 1;
  const Int4Line elements(a.m, line);
  Int4Group<float> groups[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Int4Extremes extremes = {};
    const int64_t start = (first + i) * size, end = min(start + size, length);
    for (int64_t k = start + lane; k < end; k += 32) extend(extremes, deployed_one<kType, kDeploy>(a.x, elements.at(k)));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) extend(extremes, of_lane(extremes, distance));
    groups[i] = int4_group_of<kDeploy>(extremes, a.m.format.symmetric);
    if (kQuantize && i < count && lane == 0) store_group<kDeploy>(a, line * a.groups + first + i, groups[i]);
  }
  const int64_t start = first * size, nibbles = count * size;
  if constexpr (kQuantize) {
    for (int64_t byte = lane; byte < (nibbles + 1) / 2; byte += 32) {
      uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t k = 2 * byte + i;
        const Int4Group<float> g = select(k >= size && count == 2, groups[0], groups[1]);
        const float x = start + k < length && k < nibbles ? deployed_one<kType, kDeploy>(a.x, elements.at(start + k)) : 0.0f;
        codes |= code_of(x, g) << (4 * i);
      }
      a.data[line * a.line_bytes + start / 2 + byte] = static_cast<uint8_t>(codes);
    }
  } else {
    for (int64_t k = lane; k < min(nibbles, length - start); k += 32) {
      const Int4Group<float> g = select(k >= size, groups[0], groups[1]);
      const int64_t index = elements.at(start + k);
      const float x = deployed_one<kType, kDeploy>(a.x, index);
      store_one_result<kType, kDeploy>(a.result, index, fake_of(x, g), g.scale != g.scale);
    }
  }
}

template <ElementType kResult, ElementType kDeploy>
static __global__ void __launch_bounds__(kInt4Threads) int4_decode_any(const Int4Arguments a) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kInt4Threads + threadIdx.x;
  if (at >= a.all_elements) return;
  // Neighbouring threads write neighbouring elements.
  const int64_t row = at / a.m.columns, column = at % a.m.columns;
  const int64_t line = a.m.columnwise ? row / a.m.rows * a.m.columns + column : row;
  const int64_t k = a.m.columnwise ? row % a.m.rows : column;
  const int64_t group = line * a.groups + k / a.m.format.group;
  const uint32_t code = (a.data[line * a.line_bytes + k / 2] >> (k % 2 * 4)) & 15u;
  const int zero = a.zero ? a.zero[group] : static_cast<int>(kInt4Middle);
  const float scale = int4_decode_scale<float, Int4Deploy<kDeploy>>(a.scale[group]);
  store_one_result<kResult, kDeploy>(a.result, at, static_cast<float>(static_cast<int>(code) - zero) * scale,
                                     scale != scale);
}

}  // namespace cuda
}  // namespace jaxlowprec
