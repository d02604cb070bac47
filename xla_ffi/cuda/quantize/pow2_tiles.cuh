// Quantisation of bfloat16 along columns, and rows too if that is wanted, to formats whose scales are powers of two:
// matrices of whole tiles of 128 x 128.
//
//   rows: 16 elements a thread, a block's maximum by shuffles, codes straight to their places
//   columns: 16 rows of a pair of columns a thread, whose two scales and codes are computed together; 32 rows by one
//   shuffle,
//     128 by shared memory; codes are gathered in shared memory and leave as whole pieces of a column's line
//
// Bytes moved per element: 2 read; for each direction 1/2 or 1 written and the scales: 1/32. Launch: blocks of 512 threads,
// as many as the device holds at once, each going through tiles from the matrices' end.
#pragma once

#include <type_traits>

#include "pow2_rows.cuh"
#include "tile.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kPow2TileThreads = 512;
constexpr int kPow2TileBlocks = 2;  // of a multiprocessor

template <class Code>
struct Pow2TilesShared {
  TileBuffers tiles;
  std::conditional_t<Code::kPacked, PackedColumns, uint4[kTile][kTileSixteens]> codes;
  uint32_t column_scales[kTile];  // MX: four bytes; Float8Block: a float32
  uint32_t column_amax[kTile / 32][kTilePairs];
};

/// Eight neighbouring chunks of a row meet no bank twice, and neither do the words of 16 pairs of columns in rows r and r
/// + 16.
struct Pow2Place {
  JLP_DEVICE int chunk(int row, int chunk) { return chunk ^ (chunk >> 3) ^ ((row >> 4 & 1) << 2); }
};

/// The tile at `at`, in one of the two buffers. kBlock: 32 (MX) or 128 (Float8Block).
template <class Code, int kBlock>
struct Pow2Tile {
  using Shared = Pow2TilesShared<Code>;
  static constexpr bool kMx = kBlock == 32;
  static constexpr int kCodeBytes = 4 * kCodeWords<Code>;  // of 16

  const WholeTilesArguments& a;
  Shared& shared;
  const uint4 (&tile)[kTile][kTile / 8];
  TilePlace at;

  __device__ __forceinline__ void rows() const {
    constexpr int kRows = kPow2TileThreads / kTileSixteens;
    const int row = threadIdx.x / kTileSixteens, sixteen = threadIdx.x % kTileSixteens;
    const int64_t line = static_cast<int64_t>(at.batch) * a.rows + at.down * kTile + row;
    uint8_t* data = a.rowwise.data + line * a.rowwise.data_row + (at.across * kTileSixteens + sixteen) * kCodeBytes;
    uint8_t* scale = kMx ? a.rowwise.scale + line * a.rowwise.scale_row + at.across * 4 + sixteen / 2
                         : WholeDirection::scale_at(a.rowwise, at.batch, at.down * kTile + row, at.across);
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      const auto load = [&] { return row_sixteen<Pow2Place>(tile, row + kRows * i, sixteen); };
      uint32_t codes[kCodeWords<Code>];
      const PairScale found = pow2_sixteen<Code, kBlock / 16>(load(), codes, load);
      if (sixteen % (kBlock / 16) == 0) {
        if constexpr (kMx)
          *scale = static_cast<uint8_t>(found.stored);
        else
          *reinterpret_cast<uint32_t*>(scale) = float_of_e8m0(found.stored & 0xFFu);
      }
      store_codes(data, kCodeBytes, true, codes);
      data += kRows * static_cast<uint32_t>(a.rowwise.data_row), scale += kRows * static_cast<uint32_t>(a.rowwise.scale_row);
    }
  }

  /// 16 rows of a pair of columns: codes to shared memory.
  __device__ __forceinline__ void columns() const {
    // Computed anew where registers are short.
    const int thread = static_cast<int>(Code::kPacked || !kMx ? threadIdx.x : not_kept(threadIdx.x));
    const int pair = thread / 32 % 4 * 16 + thread % 16, down = thread / 128, half = thread / 16 % 2;
    const auto* words =
        reinterpret_cast<const uint32_t*>(&tile[32 * down + 16 * half][Pow2Place::chunk(16 * half, pair / 4)]) + pair % 4;
    const auto word = [&](int row) { return words[row * (kTile / 2)]; };
    uint32_t taken[16], signs[4], amaxes = 0;  // 8 bits: z; E2M1: magnitudes, and the signs of z, four rows a word
    const auto take = [&](const uint32_t(&x)[16], bool is_scaled) {
#pragma unroll
      for (int r = 0; r < 16; r += 4) {
        uint32_t z[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = is_scaled ? x[r + i] : positive_zeros(x[r + i]);
        if constexpr (Code::kPacked) signs[r / 4] = signs_of_four(z);
#pragma unroll
        for (int i = 0; i < 4; ++i) taken[r + i] = Code::kPacked ? x[r + i] & 0x7FFF7FFFu : z[i];
      }
    };
    {
      uint32_t x[16];
#pragma unroll
      for (int r = 0; r < 16; ++r) x[r] = word(r);
      take(x, false);
#pragma unroll
      for (int r = 0; r < 16; r += 2) amaxes = __vimax3_u16x2(amaxes, x[r] & 0x7FFF7FFFu, x[r + 1] & 0x7FFF7FFFu);
    }
    amaxes = __vmaxu2(amaxes, __shfl_xor_sync(0xFFFFFFFFu, amaxes, 16));
    if constexpr (!kMx) {
      if (half == 0) shared.column_amax[down][pair] = amaxes;
      __syncthreads();
      amaxes =
          __vmaxu2(__vimax3_u16x2(shared.column_amax[0][pair], shared.column_amax[1][pair], shared.column_amax[2][pair]),
                   shared.column_amax[3][pair]);
    }
    PairScale scale = pair_scale<Code>(amaxes);
    if (is_rare<Code>(amaxes)) {
      uint32_t x[16];
#pragma unroll
      for (int r = 0; r < 16; ++r) x[r] = word(r);
      scale_rare<!kMx>(x, amaxes, scale);
      take(x, true);
    }
    if (half == 0) {
      if constexpr (kMx) {
        auto* to = reinterpret_cast<uint8_t*>(&shared.column_scales[2 * pair]) + down;
        to[0] = static_cast<uint8_t>(scale.stored), to[4] = static_cast<uint8_t>(scale.stored >> 16);
      } else if (down == 0) {
        shared.column_scales[2 * pair] = float_of_e8m0(scale.stored & 0xFFFFu);
        shared.column_scales[2 * pair + 1] = float_of_e8m0(scale.stored >> 16);
      }
    }
    put_codes(pair, 2 * down + half, taken, signs, scale.encode);
  }

  /// The codes of 16 rows of a pair of columns to their piece: the even columns' lines lie before the odd ones'.
  __device__ __forceinline__ void put_codes(int pair, int piece, const uint32_t (&taken)[16], const uint32_t (&signs)[4],
                                            uint32_t encode) const {
    if constexpr (Code::kPacked) {
      const PairLines lines = lines_of(encode);
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = e2m1_of_four_rows(taken + 4 * i, signs[i], lines);
      packed_piece(shared.codes, pair, 0, piece) = {__byte_perm(codes[0], codes[1], 0x5410),
                                                    __byte_perm(codes[2], codes[3], 0x5410)};
      packed_piece(shared.codes, pair, 1, piece) = {__byte_perm(codes[0], codes[1], 0x7632),
                                                    __byte_perm(codes[2], codes[3], 0x7632)};
    } else {
      uint32_t y[16], even[4], odd[4];
#pragma unroll
      for (int r = 0; r < 16; ++r) y[r] = multiply_bf16x2(taken[r], encode);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t* const four = y + 4 * i;
        even[i] = float8_of_four<Code>(BF16::low(four[0]), BF16::low(four[1]), BF16::low(four[2]), BF16::low(four[3]));
        odd[i] = float8_of_four<Code>(BF16::high(four[0]), BF16::high(four[1]), BF16::high(four[2]), BF16::high(four[3]));
      }
      shared.codes[pair][piece ^ (pair % 8)] = {even[0], even[1], even[2], even[3]};
      shared.codes[kTilePairs + pair][piece ^ (pair % 8)] = {odd[0], odd[1], odd[2], odd[3]};
    }
  }

  /// The codes and scales that columns() left in shared memory: to their places.
  __device__ __forceinline__ void store_columns() const {
    const int64_t first = static_cast<int64_t>(at.batch) * a.columns + at.across * kTile;
    if constexpr (Code::kPacked) {
      store_packed_columns<kPow2TileThreads>(a, at, shared.codes);
    } else {  // a piece of two neighbouring columns' lines
      const int pair = threadIdx.x / 8, piece = threadIdx.x % 8;
      uint8_t* const to = a.columnwise.data + (first + 2 * pair) * a.columnwise.data_row + at.down * kTile + 16 * piece;
      *reinterpret_cast<uint4*>(to) = shared.codes[pair][piece ^ (pair % 8)];
      *reinterpret_cast<uint4*>(to + a.columnwise.data_row) = shared.codes[kTilePairs + pair][piece ^ (pair % 8)];
    }
    if (threadIdx.x < kTile) {
      uint8_t* const scale =
          kMx ? a.columnwise.scale + (first + threadIdx.x) * a.columnwise.scale_row + at.down * 4
              : WholeDirection::scale_at(a.columnwise, at.batch, at.across * kTile + threadIdx.x, at.down);
      *reinterpret_cast<uint32_t*>(scale) = shared.column_scales[threadIdx.x];
    }
  }
};

/// The block's tiles of kTiles matrices, which are quantised alike. prepare(at, tiles): what a thread does to the chunks
/// that it has copied itself, before others see them.
template <class Code, int kBlock, int kTiles, class Prepare>
JLP_DEVICE void quantize_each_pow2_tile(const Tiles& places, const WholeTilesArguments* results, Prepare prepare) {
  using Chunks = OwnChunks<kPow2TileThreads, Pow2Place>;
  Pow2TilesShared<Code>& shared = block_shared<Pow2TilesShared<Code>>();
  each_tile<kTiles, kTiles == 1>(
      places,
      [&](TilePlace at, int buffer) {
        load_tile<kPow2TileThreads, Pow2Place>(places, results[kTiles == 1 ? 0 : buffer], at, shared.tiles[buffer]);
      },
      [&](TilePlace at, int buffer) {
        if constexpr (kTiles == 1) {
          const Chunks tiles[1] = {{shared.tiles[buffer]}};
          prepare(at, tiles);
        } else {
          const Chunks tiles[2] = {{shared.tiles[0]}, {shared.tiles[1]}};
          prepare(at, tiles);
        }
      },
      [&](TilePlace at, int buffer) {
        const WholeTilesArguments& a = results[kTiles == 1 ? 0 : buffer];
        const Pow2Tile<Code, kBlock> tile = {a, shared, shared.tiles[buffer], at};
        if (a.rowwise.data) tile.rows();
        if (a.columnwise.data) tile.columns();
        return [=] {
          if (tile.a.columnwise.data) tile.store_columns();
        };
      });
}

template <class Code, int kBlock>
static __global__ void __launch_bounds__(kPow2TileThreads, kPow2TileBlocks)
    quantize_pow2_tiles(const __grid_constant__ WholeTilesArguments a) {
  quantize_each_pow2_tile<Code, kBlock, 1>(a.tiles, &a, [](TilePlace, const auto&) {});
}

}  // namespace cuda
}  // namespace jaxlowprec
