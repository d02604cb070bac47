// y[M, N] = x[M, K] decode(w[N, K])^T for few rows M: the weight crosses memory once, in 4 bits, and becomes bfloat16 in the
// registers that mma.m16n8k16 reads (numerics.md 9: every product of an E2M1 code and its E4M3 scale is exact there).
//
// Data flow: the weight is the tensor core's 16-row operand, 16 weight rows by 16 k; x its 8-column one, 8 rows of x. A warp
// takes 128 k at a time of 16 * kRowTiles weight rows. A lane loads 16 bytes of a weight row, 32 consecutive k, straight
// into registers, those of the next 128 k before it works on these. Which k stand where in an mma is free as long as both
// operands agree: an mma takes, of lane (g, t), the codes 8 j + {i, i + 4, i + 1, i + 5} of its 32, as decoding two codes at
// a time yields them. x is copied asynchronously to shared memory, to where a lane reads its own 32 k in 16-byte pieces. K
// is split over the block's warps, 128 k each in turn, and, where there are too few weight rows to fill a GPU, over blocks.
// Sums meet in a fixed order: over warps in shared memory, over blocks in the workspace, by a second kernel.
//
// Bytes moved: a weight row's codes and scales once for every 16 rows of x; x once per 16 * kRowTiles weight rows (from L2);
// the result once, and with splits 8 bytes per element and split of the workspace.
// Launch: (weight rows / (16 * kRowTiles), splits of K, M / 16) blocks of 8 warps.
#pragma once

#include <type_traits>

#include "../codes.cuh"
#include "matmul_decode.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kDecodeWarps = 8;
constexpr int kChunk = 128;                 // k a warp takes at a time
constexpr uint32_t kNothing = 0xFFFFFE00u;  // a k beyond every row

struct MatmulDecodeArguments {
  const uint16_t* x;
  uint32_t x_stride;  // elements
  const uint8_t* data;
  uint32_t row_bytes;
  const void* scale;
  const uint8_t* zero_point;
  uint32_t groups;         // of a row
  uint32_t group_inverse;  // kInt4: 2^32 / (group / 32), rounded up; 0 for groups of 32
  int32_t scale_shift;     // log2 of the weight rows that share a scale
  const float* alpha;
  int64_t rows, columns;
  uint32_t depth;
  int32_t chunks, chunks_per_split;
  void* result;
  ElementType type;
  float* partial;  // [splits, rows, columns]; null: one split, straight to the result
};

template <int kRowTiles, int kColumnTiles>
struct MatmulDecodeShared {
  uint4 x[kDecodeWarps][2][kColumnTiles * 8][16];  // a warp's two chunks, 16 pieces of 8 k a row
  float sums[kDecodeWarps][kColumnTiles * 8][kRowTiles * 16 + 4];
};

// --- weights

/// A lane's 32 codes of one weight row, and the scales as they lie in memory: nothing that needs a load is computed before
/// all rows' loads are issued.
struct LaneCodes {
  uint32_t words[4];
  uint32_t scale;
  uint32_t second;  // kInt4: the zero point; kNvfp4: the scale of the second half, where that is not in `scale`
};

/// kWhole: 16 bytes of codes are aligned. Otherwise 8 are, and a row may end after them.
template <bool kWhole>
JLP_DEVICE void load_codes32(const uint8_t* codes, bool last_half, uint32_t (&words)[4]) {
  if constexpr (kWhole) {
    const uint4 v = *reinterpret_cast<const uint4*>(codes);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    const uint2 low = *reinterpret_cast<const uint2*>(codes);
    words[0] = low.x, words[1] = low.y, words[2] = words[3] = 0;
    if (last_half) return;
    const uint2 high = *reinterpret_cast<const uint2*>(codes + 8);
    words[2] = high.x, words[3] = high.y;
  }
}

/// Where a lane's weights lie: in rows g, g + 8, ... of the block's.
template <WeightType kWeight, int kRowTiles, bool kWhole>
struct LaneWeights {
  using Scale = std::conditional_t<kWeight == WeightType::kNvfp4, uint8_t, uint16_t>;
  const uint8_t* codes;  // of row g
  const Scale* scales;
  const uint8_t* zero_points;
  int remaining;  // rows from row g on

  __device__ __forceinline__ LaneWeights(const MatmulDecodeArguments& a, int64_t first_column) {
    const int64_t row = first_column + threadIdx.x % 32 / 4;
    codes = a.data + row * a.row_bytes;
    scales = static_cast<const Scale*>(a.scale) + (row >> a.scale_shift) * a.groups;
    zero_points = a.zero_point + row * a.groups;
    remaining = a.columns - row < kRowTiles * 16 ? static_cast<int>(a.columns - row) : kRowTiles * 16;
  }

  /// The 32 codes from k on of each row; zero, scales too, beyond a row's end and in rows that the weight has not.
  __device__ __forceinline__ void load(const MatmulDecodeArguments& a, uint32_t k, LaneCodes (&to)[kRowTiles][2]) const {
    const int rows = k < a.row_bytes * 2 ? remaining : 0;
    const bool last_half = k + 16 >= a.row_bytes * 2;
    const uint32_t group = kWeight == WeightType::kNvfp4 ? k / 16
                           : a.group_inverse             ? __umulhi(k / 32, a.group_inverse)
                                                         : k / 32;
    const uint8_t* from = codes + k / 2;
    const Scale* scale = scales + group;
#pragma unroll
    for (uint32_t i = 0; i < kRowTiles * 2; ++i) {
      LaneCodes& lane = to[i / 2][i % 2];
      lane = {};
      if (static_cast<int>(8 * i) >= rows) continue;
      load_codes32<kWhole>(from + 8 * i * a.row_bytes, last_half, lane.words);
      const uint32_t below = (8 * i >> a.scale_shift) * a.groups;
      if constexpr (kWeight == WeightType::kInt4) {
        lane.scale = scale[below];
        lane.second = a.zero_point ? zero_points[group + below] : 8u;
      } else if constexpr (kWhole) {
        lane.scale = *reinterpret_cast<const uint16_t*>(scale + below);
      } else {
        lane.scale = scale[below];
        if (!last_half) lane.second = scale[below + 1];
      }
    }
  }
};

/// The factors that turn codes into weights: a pair of bfloat16 for either half of the lane's 32 codes.
struct LaneFactors {
  uint32_t scale[2];
  uint32_t offset;  // kInt4: -(128 + zero point)
};

template <WeightType kWeight>
JLP_DEVICE LaneFactors factors_of(const LaneCodes& codes) {
  LaneFactors factors = {};
  if constexpr (kWeight == WeightType::kNvfp4) {
    // Times 2^118: e2m1_pair has 2^-126, and the largest scale, 448, must not overflow. The missing 2^8 is the epilogue's.
    constexpr float k2To118 = 3.3230699894622897e35f;
    float scale[2];
    decode_float8_pair<E4M3>(codes.scale | codes.second << 8, scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) factors.scale[i] = bf16x2(scale[i] * k2To118, scale[i] * k2To118);
  } else {
    factors.scale[0] = factors.scale[1] = codes.scale | codes.scale << 16;
    factors.offset = 0xC300C300u + codes.second * 0x00010001u;
  }
  return factors;
}
template <WeightType kWeight>
constexpr float kSumScale = kWeight == WeightType::kNvfp4 ? 256.0f : 1.0f;

/// Codes i and i + 4 of a word as weights.
template <WeightType kWeight, int i>
JLP_DEVICE uint32_t decode_pair(uint32_t codes, uint32_t scale, uint32_t offset) {
  if constexpr (kWeight == WeightType::kNvfp4) {
    return multiply_bf16x2(e2m1_pair<i>(codes), scale);
  } else {
    const uint32_t plus128 = ((codes >> (4 * i)) & 0x000F000Fu) | 0x43004300u;  // 128 + code: the mantissa's steps are 1
    return multiply_bf16x2(multiply_add_bf16x2(plus128, 0x3F803F80u, offset), scale);
  }
}

// --- x

/// Where a row's piece j of lane t lies in shared memory: so that 8 lanes that read together, two rows' four pieces, find
/// them in different banks.
JLP_DEVICE int piece_place(int row, int t, int j) { return ((j ^ (row & 1)) << 2) | t; }

/// Starts the copy of 128 k of the block's rows of x; zeros beyond the depth.
template <bool kWhole, int kRows>
JLP_DEVICE void copy_x(const MatmulDecodeArguments& a, uint4 (&to)[kRows][16], int64_t first_row, int rows, uint32_t k) {
  const int piece = threadIdx.x % 16, first = threadIdx.x % 32 / 16;  // piece 4 t + j: k 32 t + 8 j ...
  const uint32_t column = k + piece * 8;
  const uint16_t* x = a.x + (first_row + first) * a.x_stride + column;
  uint4* place = &to[first][piece_place(first, piece / 4, piece % 4)];  // the same in every second row
  if (kWhole && k + kChunk <= a.depth) {
#pragma unroll
    for (int row = 0; row < kRows; row += 2)
      if (row + first < rows) copy_async16(place + row * 16, x + row * a.x_stride);
  } else {
#pragma unroll 1
    for (int row = first; row < rows; row += 2, place += 2 * 16, x += 2 * a.x_stride) {
      uint32_t words[4] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < a.depth) words[j / 2] |= static_cast<uint32_t>(x[j]) << (j % 2 * 16);
      *place = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  copy_async_commit();
}

// --- 128 k

/// Eight k of x in the order of the weight's pairs: k and k + 4 together.
JLP_DEVICE void pair_up(const uint4& x, uint32_t (&pairs)[4]) {
  pairs[0] = __byte_perm(x.x, x.z, 0x5410), pairs[1] = __byte_perm(x.x, x.z, 0x7632);
  pairs[2] = __byte_perm(x.y, x.w, 0x5410), pairs[3] = __byte_perm(x.y, x.w, 0x7632);
}

template <WeightType kWeight, int kRowTiles, int kColumnTiles>
JLP_DEVICE void multiply_chunk(const LaneCodes (&codes)[kRowTiles][2], const uint4 (&x)[kColumnTiles * 8][16], int rows,
                               float (&sums)[kRowTiles][kColumnTiles][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  LaneFactors factors[kRowTiles][2];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) factors[tile][half] = factors_of<kWeight>(codes[tile][half]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 8 k of each lane: two mma
    uint32_t pairs[kColumnTiles][4];
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      const int row = c * 8 + g < rows ? c * 8 + g : rows - 1;  // columns of the mma that no row has repeat the last
      pair_up(x[row][piece_place(row, t, j)], pairs[c]);
    }
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      uint32_t w[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = codes[tile][half].words[j], scale = factors[tile][half].scale[j / 2];
        const uint32_t offset = factors[tile][half].offset;
        w[half][0] = decode_pair<kWeight, 0>(word, scale, offset), w[half][1] = decode_pair<kWeight, 1>(word, scale, offset);
        w[half][2] = decode_pair<kWeight, 2>(word, scale, offset), w[half][3] = decode_pair<kWeight, 3>(word, scale, offset);
      }
#pragma unroll
      for (int step = 0; step < 4; step += 2) {
        const uint32_t left[4] = {w[0][step], w[1][step], w[0][step + 1], w[1][step + 1]};
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
          const uint32_t right[2] = {pairs[c][step], pairs[c][step + 1]};
          mma_m16n8k16_bf16(sums[tile][c], left, right);
        }
      }
    }
  }
}

// --- the result

JLP_DEVICE void store_result(void* result, ElementType type, int64_t index, float value) {
  switch (type) {
    case ElementType::kBF16: return store_one<ElementType::kBF16>(result, index, value);
    case ElementType::kF16: return store_one<ElementType::kF16>(result, index, value);
    default: return store_one<ElementType::kF32>(result, index, value);
  }
}

/// The warps' sums, first to last, and where they go.
template <int kRowTiles, int kColumnTiles>
JLP_DEVICE void finish_block(const MatmulDecodeArguments& a, MatmulDecodeShared<kRowTiles, kColumnTiles>& shared,
                             const float (&sums)[kRowTiles][kColumnTiles][4], int64_t first_column, int64_t first_row,
                             int rows, float scale) {
  constexpr int kColumns = kRowTiles * 16;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) shared.sums[warp][c * 8 + 2 * t + i % 2][tile * 16 + g + i / 2 * 8] = sums[tile][c][i];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kColumns; i += kDecodeWarps * 32) {
    const int row = i / kColumns, column = i % kColumns;
    if (first_column + column >= a.columns) continue;
    float sum = shared.sums[0][row][column];
#pragma unroll
    for (int w = 1; w < kDecodeWarps; ++w) sum += shared.sums[w][row][column];
    const int64_t index = (first_row + row) * a.columns + first_column + column;
    sum *= scale;
    if (a.partial) {
      a.partial[blockIdx.y * a.rows * a.columns + index] = sum;
    } else {
      store_result(a.result, a.type, index, a.alpha ? sum * *a.alpha : sum);
    }
  }
}

template <WeightType kWeight, int kRowTiles, int kColumnTiles, bool kWhole>
static __global__ void __launch_bounds__(kDecodeWarps * 32, kColumnTiles == 1 ? 2 : 1)
    matmul_decode_kernel(const __grid_constant__ MatmulDecodeArguments a) {
  using Shared = MatmulDecodeShared<kRowTiles, kColumnTiles>;
  Shared& shared = block_shared<Shared>();
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * (kRowTiles * 16);
  const int64_t first_row = static_cast<int64_t>(blockIdx.z) * 16;
  const int rows = a.rows - first_row < kColumnTiles * 8 ? static_cast<int>(a.rows - first_row) : kColumnTiles * 8;
  const int first = blockIdx.y * a.chunks_per_split + warp;
  const int last = min(static_cast<int>(blockIdx.y + 1) * a.chunks_per_split, a.chunks);

  const LaneWeights<kWeight, kRowTiles, kWhole> weights(a, first_column);
  float sums[kRowTiles][kColumnTiles][4] = {};
  LaneCodes codes[kRowTiles][2];
  if (first < last) {
    weights.load(a, first * kChunk + 32 * t, codes);
    copy_x<kWhole>(a, shared.x[warp][0], first_row, rows, first * kChunk);
  }
  for (int chunk = first, stage = 0; chunk < last; chunk += kDecodeWarps, stage ^= 1) {
    const int next = chunk + kDecodeWarps;
    LaneCodes ahead[kRowTiles][2];
    weights.load(a, next < last ? next * kChunk + 32 * t : kNothing, ahead);
    if (next < last) copy_x<kWhole>(a, shared.x[warp][stage ^ 1], first_row, rows, next * kChunk);
    if (next < last)
      copy_async_wait<1>();
    else
      copy_async_wait<0>();
    __syncwarp();
    multiply_chunk<kWeight, kRowTiles, kColumnTiles>(codes, shared.x[warp][stage], rows, sums);
    __syncwarp();  // before this stage is written again
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) codes[tile][half] = ahead[tile][half];
  }
  finish_block(a, shared, sums, first_column, first_row, rows, kSumScale<kWeight>);
}

/// The splits' sums, first to last. Bytes moved per element of the result: 4 a split read, the element written.
static __global__ void __launch_bounds__(256) matmul_decode_sum_kernel(const float* partial, int splits, int64_t count,
                                                                       const float* alpha, void* result, ElementType type) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= count) return;
  float sum = partial[index];
  for (int split = 1; split < splits; ++split) sum += partial[split * count + index];
  store_result(result, type, index, alpha ? sum * *alpha : sum);
}

}  // namespace cuda
}  // namespace jaxlowprec
