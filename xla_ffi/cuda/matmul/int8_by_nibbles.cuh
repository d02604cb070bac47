// y[M, N] = a[M, K] b[N, K]^T of 8-bit integers and 4-bit codes, which become 8-bit integers in the registers that
// mma.m16n8k32 reads.
//
// Data flow: a block has a tile of the result and walks along K, 128 k at a time, with the next ones on their way to shared
// memory by asynchronous copies. The weight is the tensor core's 16-row operand, a its 8-column one. Of 32 k, lane (g, t)
// takes those from 8 t on: of rows 2 g and 2 g + 1 of the weight's 16 a word of codes, of row g of a's 8 bytes. Which k
// stand where in an mma is free as long as both operands agree, and which row of the weight is which.
//
// A group's sums start from the bits of a float32 whose last place is the unit of the products, so that they are a float32
// when they end: subtracting what they started from gives them exactly.
//
// Bytes moved: a once per column of tiles, b once per row of tiles, from L2; the result once.
// Launch: a block for each tile.
#pragma once

#include "../vectors.cuh"
#include "int8_by_nibbles.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kNibbleDepth = 128;  // k of a stage
constexpr int kNibbleSteps = kNibbleDepth / 32;
constexpr uint32_t kNibbleBand = 8;  // rows of tiles whose blocks run together, so that they find b in the L2 cache

struct Int8ByNibblesArguments {
  const uint8_t* a;
  const float* a_scale;
  const uint8_t* b;
  const uint8_t* b_scale;
  int64_t rows, columns, depth, groups, b_row_bytes;
  const void* accumulate;
  void* result;
  ElementType type;
};

// --- weights

/// Codes from -8 on: 16 times their number, as a byte.
template <ElementType kScaleType>
struct Int4Weight {
  using Scale = uint16_t;
  static constexpr int32_t kZero = 0x49400000;  // 1.5 * 2^19: a last place of 1/16

  /// The eight codes of a word in order: four and four bytes.
  static __device__ __forceinline__ void unpack(uint32_t word, uint32_t (&to)[2]) {
    const uint32_t even = and_xor(word << 4, 0xF0F0F0F0u, 0x80808080u), odd = and_xor(word, 0xF0F0F0F0u, 0x80808080u);
    to[0] = __byte_perm(even, odd, 0x5140), to[1] = __byte_perm(even, odd, 0x7362);
  }
  static __device__ __forceinline__ void scales(const Scale* pair, float (&to)[2]) {
    widen<kScaleType>(*reinterpret_cast<const uint32_t*>(pair), to);
  }
};

/// Codes of E2M1: twice their number.
struct Mxfp4Weight {
  using Scale = uint8_t;
  static constexpr int32_t kZero = 0x4AC00000;  // 1.5 * 2^22: a last place of 1/2

  static __device__ __forceinline__ void unpack(uint32_t word, uint32_t (&to)[2]) {
    const uint32_t magnitudes = word & 0x77777777u, even = word << 4;  // signs of all codes at the top of bytes
    const auto four = [](uint32_t which, uint32_t negative) {
      const uint32_t plus = __byte_perm(0x03020100u, 0x0C080604u, which);
      const uint32_t minus = __byte_perm(0xFDFEFF00u, 0xF4F8FAFCu, which);
      return (minus & negative) | (plus & ~negative);
    };
    to[0] = four(magnitudes, __byte_perm(even, word, 0xD9C8));  // a byte's sign, eight times
    to[1] = four(magnitudes >> 16, __byte_perm(even, word, 0xFBEA));
  }
  static __device__ __forceinline__ void scales(const Scale* pair, float (&to)[2]) {
    const uint32_t both = *reinterpret_cast<const uint16_t*>(pair);
    to[0] = e8m0_decode<float>(both & 0xFFu), to[1] = e8m0_decode<float>(both >> 8);
  }
};

// --- tiles, and what of the operands is in shared memory

/// A warp has kRowTiles times 8 rows of a by kColumnTiles times 16 of b; a block kWarpRows by kWarpColumns warps. kBlocks:
/// so many a multiprocessor's registers should hold.
template <int kRowTiles_, int kColumnTiles_, int kWarpRows, int kWarpColumns_, int kStages_, int kBlocks_>
struct NibbleTile {
  static constexpr int kRowTiles = kRowTiles_, kColumnTiles = kColumnTiles_, kWarpColumns = kWarpColumns_;
  static constexpr int kThreads = 32 * kWarpRows * kWarpColumns, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kRows = 8 * kRowTiles * kWarpRows, kColumns = 16 * kColumnTiles * kWarpColumns;
};
using FewRowsTile = NibbleTile<2, 1, 1, 4, 8, 4>;   // 16x64
using SomeRowsTile = NibbleTile<4, 1, 2, 4, 4, 2>;  // 64x64
using ManyRowsTile = NibbleTile<8, 2, 2, 4, 3, 1>;  // 128x128

template <class Weight, int kGroup, class Tile>
struct NibbleStage {
  static constexpr int kGroups = kGroup < kNibbleDepth ? kNibbleDepth / kGroup : 1;
  uint4 a[Tile::kRows][8];
  uint4 b[Tile::kColumns / 2][8];  // two rows each
  typename Weight::Scale scale[kGroups][Tile::kColumns];
};
template <class Weight, int kGroup, class Tile>
struct NibbleStages {
  NibbleStage<Weight, kGroup, Tile> stage[Tile::kStages];
};

// Where a row's piece of 16 bytes lies in its line of 128, so that lanes which read together find theirs in different banks:
// of a, four rows' 32 bytes; of b, 16 bytes of eight rows, every second one.
JLP_DEVICE int a_piece(int row, int piece) { return piece ^ ((row & 3) << 1); }
JLP_DEVICE int b_piece(int row, int piece) { return (piece | (row & 1) << 2) ^ ((row >> 1) & 7); }

/// What a thread copies for the stages in turn. Rows beyond the last are the last one's: none of their results is stored.
template <class Weight, int kGroup, class Tile>
class NibbleCopies {
  using Stage = NibbleStage<Weight, kGroup, Tile>;
  using Scale = typename Weight::Scale;
  static constexpr int kRowsOfA = Tile::kThreads / 8, kRowsOfB = Tile::kThreads / 4;  // that the block copies at a time
  static constexpr int kOfA = Tile::kRows / kRowsOfA, kOfB = Tile::kColumns / kRowsOfB;
  static constexpr int kPerPiece = 16 / static_cast<int>(sizeof(Scale));
  static constexpr int kPieces = Tile::kColumns / kPerPiece;  // of a group's scales
  static_assert(kRowsOfA % 4 == 0 && kRowsOfB % 16 == 0, "a thread's pieces lie in the same place of their lines");
  static_assert(Stage::kGroups * kPieces <= Tile::kThreads, "a thread has one piece of scales at most");

 public:
  __device__ __forceinline__ NibbleCopies(const Int8ByNibblesArguments& a, int64_t first_row, int64_t first_column)
      : a_row_(threadIdx.x / 8), a_at_(threadIdx.x % 8 * 16), b_row_(threadIdx.x / 4), b_at_(threadIdx.x % 4 * 16) {
#pragma unroll
    for (int i = 0; i < kOfA; ++i) a_[i] = a.a + min(first_row + a_row_ + i * kRowsOfA, a.rows - 1) * a.depth;
#pragma unroll
    for (int i = 0; i < kOfB; ++i) b_[i] = a.b + min(first_column + b_row_ + i * kRowsOfB, a.columns - 1) * a.b_row_bytes;
    column_ = first_column + threadIdx.x % kPieces * kPerPiece;
    scales_ = reinterpret_cast<const Scale*>(a.b_scale) + column_;
  }

  /// Starts those of a stage: zeros beyond the end of K.
  __device__ __forceinline__ void start(const Int8ByNibblesArguments& a, uint32_t chunk, Stage& to) const {
    const uint32_t a_at = chunk * kNibbleDepth + a_at_, b_at = chunk * (kNibbleDepth / 2) + b_at_;
#pragma unroll
    for (int i = 0; i < kOfA; ++i)
      copy_async16_or_zeros(&to.a[a_row_ + i * kRowsOfA][a_piece(a_row_, a_at_ / 16)], a_[i] + a_at, a_at < a.depth);
#pragma unroll
    for (int i = 0; i < kOfB; ++i)
      copy_async16_or_zeros(&to.b[(b_row_ + i * kRowsOfB) / 2][b_piece(b_row_, b_at_ / 16)], b_[i] + b_at,
                            b_at < a.b_row_bytes);
    const int line = threadIdx.x / kPieces;
    if (line >= Stage::kGroups) return;
    const uint32_t group = chunk * kNibbleDepth / kGroup + line;
    copy_async16_or_zeros(&to.scale[line][threadIdx.x % kPieces * kPerPiece], scales_ + group * a.columns,
                          group < a.groups && column_ < a.columns);
  }

 private:
  const uint8_t *a_[kOfA], *b_[kOfB];
  const Scale* scales_;
  int64_t column_;
  int a_row_, a_at_, b_row_, b_at_;
};

// --- 128 k

template <class Tile>
struct NibbleSums {
  int32_t group[Tile::kColumnTiles][Tile::kRowTiles][4];  // of the group so far
  float all[Tile::kColumnTiles][Tile::kRowTiles][4];
};

/// Where the calling thread's warp has its part of the block's tile.
template <class Tile>
JLP_DEVICE int warp_row() {
  return static_cast<int>(threadIdx.x) / 32 / Tile::kWarpColumns * (8 * Tile::kRowTiles);
}
template <class Tile>
JLP_DEVICE int warp_column() {
  return static_cast<int>(threadIdx.x) / 32 % Tile::kWarpColumns * (16 * Tile::kColumnTiles);
}

/// The group's sums times its scales to the others, rounded once. A group that there is not adds -0, which changes nothing.
template <class Weight, class Tile>
JLP_DEVICE void end_group(const typename Weight::Scale* scales, bool there, NibbleSums<Tile>& sums) {
#pragma unroll
  for (int c = 0; c < Tile::kColumnTiles; ++c) {
    float pair[2];
    Weight::scales(scales + warp_column<Tile>() + 16 * c + threadIdx.x % 32 / 4 * 2, pair);
    if (!there) pair[0] = pair[1] = -0.0f;
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = __int_as_float(sums.group[c][r][i]) - __int_as_float(Weight::kZero);
        sums.all[c][r][i] = __fmaf_rn(sum, pair[i / 2], sums.all[c][r][i]);
      }
  }
}

/// 32 k of a warp's tiles. kStarts: of a group, the first.
template <class Weight, bool kStarts, class Tile>
JLP_DEVICE void multiply_step(const uint32_t (&codes)[Tile::kColumnTiles][2][kNibbleSteps], int step,
                              const uint32_t (&right)[Tile::kRowTiles][2], NibbleSums<Tile>& sums) {
  const int32_t zeros[4] = {Weight::kZero, Weight::kZero, Weight::kZero, Weight::kZero};
#pragma unroll
  for (int c = 0; c < Tile::kColumnTiles; ++c) {
    uint32_t even[2], odd[2];
    Weight::unpack(codes[c][0][step], even), Weight::unpack(codes[c][1][step], odd);
    const uint32_t left[4] = {even[0], odd[0], even[1], odd[1]};
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) {
      int32_t(&sum)[4] = sums.group[c][r];
      if constexpr (kStarts)
        mma_m16n8k32_s8(sum, left, right[r], zeros);
      else
        mma_m16n8k32_s8(sum, left, right[r], sum);
    }
  }
}

/// `chunks`: of all of K. Groups of 256 end with every second one, or the last.
template <class Weight, int kGroup, class Tile>
JLP_DEVICE void multiply_stage(const NibbleStage<Weight, kGroup, Tile>& stage, uint32_t chunk, uint32_t chunks,
                               int64_t groups, NibbleSums<Tile>& sums) {
  constexpr int kStepsOfGroup = kGroup / 32, kGroups = NibbleStage<Weight, kGroup, Tile>::kGroups;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t codes[Tile::kColumnTiles][2][kNibbleSteps];  // of rows 2 g and 2 g + 1
#pragma unroll
  for (int c = 0; c < Tile::kColumnTiles; ++c)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = warp_column<Tile>() + 16 * c + lane % 8 * 2 + odd;
      ldmatrix_x4(codes[c][odd], &stage.b[row / 2][b_piece(row, lane / 8)]);
    }
#pragma unroll
  for (int step = 0; step < kNibbleSteps; ++step) {
    uint32_t right[Tile::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) {
      const int row = warp_row<Tile>() + 8 * r + g;
      const uint2 v = reinterpret_cast<const uint2*>(&stage.a[row][a_piece(row, 2 * step + t / 2)])[t % 2];
      right[r][0] = v.x, right[r][1] = v.y;
    }
    const bool starts = step % kStepsOfGroup == 0 && (kStepsOfGroup <= kNibbleSteps || chunk % 2 == 0);
    starts ? multiply_step<Weight, true>(codes, step, right, sums) : multiply_step<Weight, false>(codes, step, right, sums);
    if (step % kStepsOfGroup == kStepsOfGroup - 1) {
      const int group = step / kStepsOfGroup;
      end_group<Weight>(stage.scale[group], kGroups == 1 || chunk * kGroups + group < groups, sums);
    }
  }
  if (kStepsOfGroup > kNibbleSteps && (chunk % 2 == 1 || chunk + 1 == chunks)) end_group<Weight>(stage.scale[0], true, sums);
}

// --- the result

template <ElementType kType, class Tile>
JLP_DEVICE void store_tile(const Int8ByNibblesArguments& a, const NibbleSums<Tile>& sums, int64_t first_row,
                           int64_t first_column) {
  constexpr int kWords = 2 / kPerWord<kType>;
  using Pair = std::conditional_t<kWords == 2, uint2, uint32_t>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int64_t row = first_row + warp_row<Tile>() + 8 * r + 2 * t + odd;
      if (row >= a.rows) continue;
      const float scale = __ldg(a.a_scale + row);
#pragma unroll
      for (int c = 0; c < Tile::kColumnTiles; ++c) {
        const int64_t column = first_column + warp_column<Tile>() + 16 * c + 2 * g;
        if (column >= a.columns) continue;
        const int64_t at = (row * a.columns + column) / 2;
        float v[2] = {sums.all[c][r][odd] * scale, sums.all[c][r][2 + odd] * scale};
        uint32_t words[kWords];
        if (a.accumulate) {
          float onto[2];
          const Pair given = static_cast<const Pair*>(a.accumulate)[at];
          std::memcpy(words, &given, sizeof words);
#pragma unroll
          for (int i = 0; i < kWords; ++i) widen<kType>(words[i], onto + i);
          v[0] = v[0] + onto[0], v[1] = v[1] + onto[1];
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = narrow<kType>(v + i);
        Pair pair;
        std::memcpy(&pair, words, sizeof pair);
        static_cast<Pair*>(a.result)[at] = pair;
      }
    }
}

template <class Weight, int kGroup, class Tile>
static __global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    int8_by_nibbles_kernel(const __grid_constant__ Int8ByNibblesArguments a) {
  auto& shared = block_shared<NibbleStages<Weight, kGroup, Tile>>();
  const uint32_t down = static_cast<uint32_t>((a.rows + Tile::kRows - 1) / Tile::kRows);
  const uint32_t across = static_cast<uint32_t>((a.columns + Tile::kColumns - 1) / Tile::kColumns);
  const uint32_t band = blockIdx.x / (kNibbleBand * across), in_band = blockIdx.x % (kNibbleBand * across);
  const uint32_t height = min(kNibbleBand, down - band * kNibbleBand);
  const int64_t first_row = int64_t{band * kNibbleBand + in_band % height} * Tile::kRows;
  const int64_t first_column = int64_t{in_band / height} * Tile::kColumns;
  const uint32_t chunks = static_cast<uint32_t>((a.depth + kNibbleDepth - 1) / kNibbleDepth);

  const NibbleCopies<Weight, kGroup, Tile> copies(a, first_row, first_column);
  const auto copy = [&](uint32_t chunk, uint32_t stage) {
    if (chunk < chunks) copies.start(a, chunk, shared.stage[stage]);
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < Tile::kStages - 1; ++i) copy(i, i);
  NibbleSums<Tile> sums = {};
  uint32_t stage = 0, free = Tile::kStages - 1;
#pragma unroll 1
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    copy_async_wait<Tile::kStages - 2>();
    __syncthreads();  // everyone's copies are there, and everyone is done with the stage before
    copy(chunk + Tile::kStages - 1, free);
    multiply_stage(shared.stage[stage], chunk, chunks, a.groups, sums);
    free = stage, stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
  }
  copy_async_wait<0>();
  if (a.type == ElementType::kF32)
    store_tile<ElementType::kF32>(a, sums, first_row, first_column);
  else
    store_tile<ElementType::kBF16>(a, sums, first_row, first_column);
}

}  // namespace cuda
}  // namespace jaxlowprec
