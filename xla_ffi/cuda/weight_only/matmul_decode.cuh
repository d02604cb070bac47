// y[M, N] = x[M, K] decode(w[N, K])^T for few rows M: the weight crosses memory once, in 4 bits, and becomes bfloat16 in the
// registers that mma.m16n8k16 reads (numerics.md 9: every product of an E2M1 code and its E4M3 scale is exact there).
//
// Data flow: the weight is the tensor core's 16-row operand, 16 weight rows by 16 k; x its 8-column one, 8 rows of x. A warp
// has 16 weight rows and walks along K, 128 k at a time. A lane loads 16 bytes of a weight row, 32 consecutive k, straight
// into registers, kAhead times 128 k before it works on them: these loads are all that waits for memory. Which k stand where
// in an mma is free as long as both operands agree: an mma takes, of lane (g, t), the codes 8 j + {i, i + 4, i + 1, i + 5}
// of its 32, as decoding two codes at a time yields them. The block's warps share 2048 k of x in shared memory, in that
// order. Tensor cores cut off what they add, so their sums end with the 2048 k and are added up outside. Where there are too
// few weight rows to fill a GPU, K is split over blocks; their sums meet in the workspace, in a fixed order, by a second
// kernel.
//
// Bytes moved: a weight row's codes and scales once for every 16 rows of x; x once per 128 weight rows (from L2); the result
// once, and with splits 8 bytes per element and split of the workspace.
// Launch: (weight rows / 128, splits of K, M / 16) blocks of 8 warps.
#pragma once

#include <type_traits>

#include "../codes.cuh"
#include "matmul_decode.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kDecodeWarps = 8;
constexpr int kDecodeColumns = kDecodeWarps * 16;  // weight rows of a block
constexpr int kChunk = 128;                        // k a warp takes at a time
constexpr int kSlice = 16;                         // chunks of x in shared memory
constexpr int kAhead = 2;                          // chunks of the weight that are being loaded
static_assert(kSlice % kAhead == 0);

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
  int32_t chunks_per_split;  // a multiple of kAhead: the last ones' weights and x may be beyond K, where they are zero
  void* result;
  ElementType type;
  float* partial;  // [splits, rows, columns]; null: one split, straight to the result
};

template <int kColumnTiles>
struct MatmulDecodeShared {
  uint4 x[kSlice][kColumnTiles * 8][16];  // 16 pieces of 8 k a row
};

// --- weights

/// A lane's 32 codes of one weight row, and the scales as they lie in memory: nothing that needs a load is computed when it
/// is issued.
struct LaneCodes {
  uint32_t words[4];
  uint32_t scale;
  uint32_t second;  // kInt4: the zero point; kNvfp4: the scale of the second half, where that is not in `scale`
};

/// kWhole: 16 bytes of codes are aligned. Otherwise 8 are, and a row may end after them.
template <bool kWhole>
JLP_DEVICE void load_codes32(const uint8_t* codes, bool last_half, uint32_t (&words)[4]) {
  if constexpr (kWhole) {
    const uint4 v = load_line16(codes);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
    const uint2 low = *reinterpret_cast<const uint2*>(codes);
    words[0] = low.x, words[1] = low.y, words[2] = words[3] = 0;
    if (last_half) return;
    const uint2 high = *reinterpret_cast<const uint2*>(codes + 8);
    words[2] = high.x, words[3] = high.y;
  }
}

/// Where a lane's weights lie: in rows g and g + 8 of the warp's, 32 k of every chunk.
template <WeightType kWeight, bool kWhole>
struct LaneWeights {
  using Scale = std::conditional_t<kWeight == WeightType::kNvfp4, uint8_t, uint16_t>;
  const uint8_t* codes;  // of row g
  const Scale* scales;
  const uint8_t* zero_points;
  uint32_t first;  // k of the lane in a chunk
  int remaining;   // rows from row g on

  __device__ __forceinline__ LaneWeights(const MatmulDecodeArguments& a, int64_t first_column) {
    const int64_t row = first_column + threadIdx.x % 32 / 4;
    first = threadIdx.x % 4 * 32;
    codes = a.data + row * a.row_bytes + first / 2;
    scales = static_cast<const Scale*>(a.scale) + (row >> a.scale_shift) * a.groups;
    if constexpr (kWeight == WeightType::kNvfp4) scales += first / 16;
    zero_points = a.zero_point + row * a.groups;
    remaining = a.columns - row < 16 ? static_cast<int>(a.columns - row) : 16;
  }

  /// The 32 codes of each row; zero, scales too, beyond a row's end, where `there` is false, and in rows that the weight has
  /// not.
  __device__ __forceinline__ void load(const MatmulDecodeArguments& a, int chunk, bool there, LaneCodes (&to)[2]) const {
    const uint32_t k = chunk * kChunk + first;
    const int rows = there && k < a.row_bytes * 2 ? remaining : 0;
    const bool last_half = k + 16 >= a.row_bytes * 2;
    const uint8_t* from = codes + chunk * (kChunk / 2);
    uint32_t group = chunk * (kChunk / 16);
    if constexpr (kWeight == WeightType::kInt4) group = a.group_inverse ? __umulhi(k / 32, a.group_inverse) : k / 32;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      LaneCodes& lane = to[i];
      lane = {};
      if (static_cast<int>(8 * i) >= rows) continue;
      load_codes32<kWhole>(from + 8 * i * a.row_bytes, last_half, lane.words);
      const Scale* scale = scales + (8 * i >> a.scale_shift) * a.groups + group;
      if constexpr (kWeight == WeightType::kInt4) {
        lane.scale = *scale;
        lane.second = a.zero_point ? zero_points[8 * i * a.groups + group] : 8u;
      } else if constexpr (kWhole) {
        lane.scale = *reinterpret_cast<const uint16_t*>(scale);
      } else {
        lane.scale = scale[0];
        if (!last_half) lane.second = scale[1];
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
    const uint32_t plus128 = and_or(codes >> (4 * i), 0x000F000Fu, 0x43004300u);  // 128 + code: the mantissa's steps are 1
    return multiply_bf16x2(multiply_add_bf16x2(plus128, 0x3F803F80u, offset), scale);
  }
}

// --- x

/// Eight k of x in the order of the weight's pairs: k and k + 4 together.
JLP_DEVICE uint4 pair_up(const uint4& x) {
  return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                    __byte_perm(x.y, x.w, 0x7632));
}

/// Where a row's piece j of lane t lies in shared memory: so that 8 lanes that read together, two rows' four pieces, find
/// them in different banks.
JLP_DEVICE int piece_place(int row, int t, int j) { return ((j ^ (row & 1)) << 2) | t; }

/// Eight k of a row of x from `column` on; zeros beyond the depth.
template <bool kWhole>
JLP_DEVICE uint4 load_x(const MatmulDecodeArguments& a, int64_t row, uint32_t column) {
  const uint16_t* x = a.x + row * a.x_stride + column;
  if (column >= a.depth) return make_uint4(0, 0, 0, 0);
  if constexpr (kWhole) return __ldg(reinterpret_cast<const uint4*>(x));  // rows are whole eights
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (column + i < a.depth) words[i / 2] |= static_cast<uint32_t>(x[i]) << (i % 2 * 16);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Chunks `first_chunk` to `end_chunk`, a slice at most, of the block's rows of x to shared memory. A thread's loads are
/// issued before it needs one.
template <bool kWhole, int kRows>
JLP_DEVICE void fill_x(const MatmulDecodeArguments& a, uint4 (&to)[kSlice][kRows][16], int64_t first_row, int rows,
                       int first_chunk, int end_chunk) {
  constexpr int kAtOnce = 4, kStep = kDecodeWarps * 32 / 16;  // rows that the block copies at a time
  const int piece = threadIdx.x % 16;                         // piece 4 t + j: k 32 t + 8 j ...
#pragma unroll
  for (int start = 0; start < kSlice * kRows; start += kAtOnce * kStep) {
    uint4 pieces[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = start + i * kStep + threadIdx.x / 16, row = line % kRows;
      const int chunk = first_chunk + line / kRows;
      if (row < rows && chunk < end_chunk) pieces[i] = load_x<kWhole>(a, first_row + row, chunk * kChunk + piece * 8);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int line = start + i * kStep + threadIdx.x / 16, row = line % kRows;
      if (row < rows && first_chunk + line / kRows < end_chunk)
        to[line / kRows][row][piece_place(row, piece / 4, piece % 4)] = pair_up(pieces[i]);
    }
  }
}

// --- 128 k

/// Two sums for every element, so that an mma need not wait for the one before.
template <int kColumnTiles>
struct Sums {
  float v[2][kColumnTiles][4] = {};
};

/// 16 weight rows by 128 k. x(c, j): eight k of the lane's row of column tile c, in the order of pair_up. The two mma of
/// eight k add to sum_of(0, c) and sum_of(1, c), which may be the same.
template <WeightType kWeight, int kColumnTiles, class X, class SumOf>
JLP_DEVICE void multiply_codes(const LaneCodes (&codes)[2], X x, SumOf sum_of) {
  const LaneFactors factors[2] = {factors_of<kWeight>(codes[0]), factors_of<kWeight>(codes[1])};
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 8 k of each lane: two mma
    uint32_t w[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = codes[half].words[j], scale = factors[half].scale[j / 2], offset = factors[half].offset;
      w[half][0] = decode_pair<kWeight, 0>(word, scale, offset), w[half][1] = decode_pair<kWeight, 1>(word, scale, offset);
      w[half][2] = decode_pair<kWeight, 2>(word, scale, offset), w[half][3] = decode_pair<kWeight, 3>(word, scale, offset);
    }
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      const uint4 pairs = x(c, j);
      const uint32_t left[2][4] = {{w[0][0], w[1][0], w[0][1], w[1][1]}, {w[0][2], w[1][2], w[0][3], w[1][3]}};
      const uint32_t right[2][2] = {{pairs.x, pairs.y}, {pairs.z, pairs.w}};
      mma_m16n8k16_bf16(sum_of(0, c), left[0], right[0]);
      mma_m16n8k16_bf16(sum_of(1, c), left[1], right[1]);
    }
  }
}

template <WeightType kWeight, int kColumnTiles>
JLP_DEVICE void multiply_chunk(const LaneCodes (&codes)[2], const uint4 (&x)[kColumnTiles * 8][16], int rows,
                               Sums<kColumnTiles>& sums) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto pairs = [&](int c, int j) {
    const int row = c * 8 + g < rows ? c * 8 + g : rows - 1;  // columns of the mma that no row has repeat the last
    return x[row][piece_place(row, t, j)];
  };
  multiply_codes<kWeight, kColumnTiles>(codes, pairs, [&](int i, int c) -> float(&)[4] { return sums.v[i][c]; });
}

// --- the result

JLP_DEVICE void store_result(void* result, ElementType type, int64_t index, float value) {
  switch (type) {
    case ElementType::kBF16: return store_one<ElementType::kBF16>(result, index, value);
    case ElementType::kF16: return store_one<ElementType::kF16>(result, index, value);
    default: return store_one<ElementType::kF32>(result, index, value);
  }
}

/// A warp's sums to the result, or to the split's place in the workspace.
template <int kColumnTiles>
JLP_DEVICE void store_sums(const MatmulDecodeArguments& a, const float (&sums)[kColumnTiles][4], int64_t first_column,
                           int64_t first_row, int rows, float scale) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = c * 8 + 2 * t + i % 2;
      const int64_t column = first_column + g + i / 2 * 8;
      if (row >= rows || column >= a.columns) continue;
      const int64_t index = (first_row + row) * a.columns + column;
      const float sum = sums[c][i] * scale;
      if (a.partial)
        a.partial[blockIdx.y * a.rows * a.columns + index] = sum;
      else
        store_result(a.result, a.type, index, a.alpha ? sum * *a.alpha : sum);
    }
}

#if __CUDA_ARCH__ >= 900
constexpr int kDecodeBlocks = 2;  // of a multiprocessor
#else
constexpr int kDecodeBlocks = 1;  // two would spill registers
#endif

template <WeightType kWeight, int kColumnTiles, bool kWhole>
static __global__ void __launch_bounds__(kDecodeWarps * 32, kColumnTiles == 1 ? 2 : kDecodeBlocks)
    matmul_decode_kernel(const __grid_constant__ MatmulDecodeArguments a) {
  using Shared = MatmulDecodeShared<kColumnTiles>;
  Shared& shared = block_shared<Shared>();
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kDecodeColumns + threadIdx.x / 32 * 16;
  const int64_t first_row = static_cast<int64_t>(blockIdx.z) * 16;
  const int rows = a.rows - first_row < kColumnTiles * 8 ? static_cast<int>(a.rows - first_row) : kColumnTiles * 8;
  const int first = blockIdx.y * a.chunks_per_split, end = first + a.chunks_per_split;

  const LaneWeights<kWeight, kWhole> weights(a, first_column);
  const auto load = [&](int chunk, LaneCodes(&to)[2]) { weights.load(a, chunk, chunk < end, to); };
  float total[kColumnTiles][4] = {};
  LaneCodes codes[kAhead][2];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(first + i, codes[i]);
  for (int slice = first; slice < end; slice += kSlice) {
    const int slice_end = min(slice + kSlice, end);
    if (slice != first) __syncthreads();  // the one before has been read
    fill_x<kWhole>(a, shared.x, first_row, rows, slice, slice_end);
    __syncthreads();
    Sums<kColumnTiles> sums;
    for (int chunk = slice; chunk < slice_end; chunk += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        multiply_chunk<kWeight>(codes[i], shared.x[chunk - slice + i], rows, sums);
        load(chunk + i + kAhead, codes[i]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[c][i] += sums.v[0][c][i] + sums.v[1][c][i];
  }
  store_sums(a, total, first_column, first_row, rows, kSumScale<kWeight>);
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
