// Quantisation of bfloat16 to NVFP4 along columns, rotated or not, and rows too if that is wanted: 1x16, matrices of whole
// tiles of 128 x 128. Scales of 24 bits are not exact in bfloat16, so codes are made of float32.
//
// A thread takes 64 elements in each direction: rows as quantize_tiles.cuh; columns that are not rotated in pairs, of which
// maxima, signs and scales are computed together. Elements that saturate, or whose block is poisoned, are rare: they are
// first replaced by what has the right code.
//
// Bytes moved per element: 2 read; for each direction 1/2 written and the scales: 1/16. Launch: blocks of 256 threads, as
// many as the device holds at once, each going through tiles from the matrices' end.
#pragma once

#include "quantize_scales.cuh"
#include "rotate.cuh"
#include "tile.cuh"

namespace jaxlowprec {
namespace cuda {

// The random bytes of a tile's lines in one direction (numerics.md 4). Philox's counter is (sixteen, line, stream, 0), so
// its first rounds do much of their work for all sixteens of a line, or for all lines of a sixteen, which is done once a
// tile:
//
//   round 1: the product of `stream` is one for all, that of the sixteen's index belongs to the sixteen
//   round 2: word 0 depends on the line alone, word 2 on the sixteen alone, and so do their products
//   round 3: word 0 depends on the sixteen alone; the product of word 2 is left, and all of rounds 4 to 10
//
// 15 of the 20 wide products are left to each sixteen of a line, and one for each line and three for each sixteen of a tile.

/// 64 bits of a product.
struct Wide {
  uint32_t high, low;
};
JLP_DEVICE Wide philox_product(uint32_t word, uint32_t multiplier) {
  Wide product;
  Lanes<float>::multiply_wide(word, multiplier, product.high, product.low);
  return product;
}

template <bool kStochastic>
struct TileRandom {};

template <>
struct TileRandom<true> {
  RoundKeys<true> keys;
  alignas(16) uint2 lines[kTile];             // round 2's product of word 0: high, low
  alignas(16) uint4 sixteens[kTileSixteens];  // what is combined with the line's in rounds 2 and 3, see bytes()

  /// By a thread for each line, from 0 on; `line` and `sixteen` are the tile's first. Barriers must be before and after.
  __device__ __forceinline__ void start_tile(const Random& random, uint32_t line, uint32_t sixteen, uint32_t thread) {
    const auto key = [&](int round, int word) { return keys.words[2 * round + word]; };
    const Wide stream = philox_product(random.stream, kPhiloxMultiplier1);
    const uint32_t index = random.rows[keys.rows + line + thread];
    const Wide of_line = philox_product(stream.high ^ index ^ key(0, 0), kPhiloxMultiplier0);
    lines[thread] = {of_line.high, of_line.low};
    if (thread >= kTileSixteens) return;
    const Wide first = philox_product(random.sixteens[keys.sixteens + sixteen + thread], kPhiloxMultiplier0);
    const Wide second = philox_product(first.high ^ key(0, 1), kPhiloxMultiplier1);
    const Wide third = philox_product(second.high ^ stream.low ^ key(1, 0), kPhiloxMultiplier0);
    sixteens[thread] = {first.low ^ key(1, 1), second.low ^ key(2, 0), third.high ^ key(2, 1), third.low};
  }

  /// Four words, little-endian, of each of these lines.
  template <int kLines>
  __device__ __forceinline__ void bytes(const uint2 (&of_lines)[kLines], uint4 of_sixteen,
                                        uint32_t (&words)[kLines][4]) const {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const Wide third = philox_product(of_lines[i].x ^ of_sixteen.x, kPhiloxMultiplier1);
      words[i][0] = third.high ^ of_sixteen.y, words[i][1] = third.low;
      words[i][2] = of_lines[i].y ^ of_sixteen.z, words[i][3] = of_sixteen.w;
    }
#pragma unroll
    for (int round = 3; round < 10; ++round) {
      const uint2 key = *reinterpret_cast<const uint2*>(keys.words + 2 * round);
#pragma unroll
      for (int i = 0; i < kLines; ++i) philox_round<float>(words[i], key.x, key.y);
    }
  }
};

constexpr int kNvfp4TileThreads = 256;
constexpr int kNvfp4TileBlocks = 2;  // of a multiprocessor

template <bool kStochastic>
struct Nvfp4TilesShared {
  TileBuffers tiles;
  PackedColumns codes;
  alignas(8) uint8_t column_scales[kTile][kTileSixteens];
  Matrix<Scales::kTwoLevel> matrices[2];  // rowwise and columnwise, as what follows
  EncodeTable tables[2];
  TileRandom<kStochastic> random[2];
};

/// Of rows, whose neighbouring sixteens then meet no bank twice.
struct Nvfp4Place {
  JLP_DEVICE int chunk(int, int chunk) { return chunk ^ (chunk >> 3); }
};

/// Random bytes of a sixteen of a line, which rounding to nearest does not read.
using Bytes = uint32_t[4];

/// A matrix and its table in one direction.
template <bool kStochastic>
struct Nvfp4Quantizer {
  const Matrix<Scales::kTwoLevel> matrix;
  const EncodeTable& table;

  /// Whether codes of a block must be limited, or it has none.
  __device__ __forceinline__ bool is_rare(uint32_t amax, float encode) const {
    return !(__fmul_rn(as_float(amax), encode) < 7.0f) || amax >= matrix.poison_from;
  }
  /// The largest magnitude, as bfloat16, that elements of a rare block are given: scaled it is 6 or little more, whose code
  /// is that of 6; or 0 if the block is poisoned.
  __device__ __forceinline__ uint32_t most(uint32_t amax, float encode) const {
    return amax >= matrix.poison_from || encode != encode ? 0u : (as_bits(__fdiv_rn(kE2M1Max, encode)) + 0xFFFFu) >> 16;
  }

  /// The bytes of the scales of two blocks.
  __device__ __forceinline__ uint32_t scale_bytes(uint32_t first, uint32_t second) const {
    const float exact[2] = {__fmul_rn(as_float(first), matrix.multiplier), __fmul_rn(as_float(second), matrix.multiplier)};
    if constexpr (kHasFloat8Conversion<E4M3>)
      return float8x2_hardware<E4M3>(exact[0], exact[1]) & 0x7F7Fu;
    else
      return float8_encode_magnitude<E4M3>(fminf(exact[0], kMaxFinite)) |
             float8_encode_magnitude<E4M3>(fminf(exact[1], kMaxFinite)) << 8;
  }

  /// A sixteen's codes, and its scale's byte.
  __device__ __forceinline__ uint32_t sixteen(Sixteen<BF16> x, const Bytes& random, uint2& codes) const {
    const uint32_t amax = magnitude_bits<BF16>(x.words);
    uint32_t byte = scale_bytes(amax, 0u);
    float encode = table[byte];
    if (is_rare(amax, encode)) {
      if (amax >= matrix.poison_from) byte = kFloat8NaN;
      const uint32_t limit = most(amax, encode) * 0x00010001u;
#pragma unroll
      for (uint32_t& word : x.words) {
        const uint32_t m = __vminu2(word & 0x7FFF7FFFu, limit);
        word = limit == 0 ? 0u : m | (word & 0x80008000u);
      }
      if (limit == 0) encode = 0.0f;
    }
    codes = {encode_e2m1<kStochastic, false>(x, 0, encode, random), encode_e2m1<kStochastic, false>(x, 1, encode, random)};
    return byte;
  }

  /// The codes of 16 rows of a pair of columns, and their scales' bytes.
  __device__ __forceinline__ uint32_t pair(uint32_t (&w)[16], const Bytes (&random)[2], uint2 (&codes)[2]) const {
    uint32_t signs[4], most_of_two = 0;
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
      const uint32_t z[4] = {negative_bf16x2(w[r]), negative_bf16x2(w[r + 1]), negative_bf16x2(w[r + 2]),
                             negative_bf16x2(w[r + 3])};
      signs[r / 4] = signs_of_four(z);
    }
#pragma unroll
    for (uint32_t& word : w) word &= 0x7FFF7FFFu;
#pragma unroll
    for (int r = 0; r < 16; r += 2) most_of_two = __vimax3_u16x2(most_of_two, w[r], w[r + 1]);
    const uint32_t amax[2] = {most_of_two << 16, most_of_two & 0xFFFF0000u};
    uint32_t bytes = scale_bytes(amax[0], amax[1]);
    float encode[2] = {table[bytes & 0xFFu], table[bytes >> 8]};
    const bool rare[2] = {is_rare(amax[0], encode[0]), is_rare(amax[1], encode[1])};
    if (rare[0] || rare[1]) {
      uint32_t limits = 0;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t limit = rare[c] ? most(amax[c], encode[c]) : 0x7F7Fu;
        limits |= limit << (16 * c);
        if (limit == 0) encode[c] = 0.0f;
        if (amax[c] < matrix.poison_from) continue;
        bytes |= kFloat8NaN << (8 * c);
#pragma unroll
        for (uint32_t& sign : signs) sign &= c ? 0xFFFFu : 0xFFFF0000u;
      }
#pragma unroll
      for (uint32_t& word : w) word = __vminu2(word, limits);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t of[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) of[c] = codes_of_column(w + 8 * half, c, encode[c], random[c] + 2 * half);
      const uint32_t even = of[0] + __byte_perm(signs[2 * half], signs[2 * half + 1], 0x5410);
      const uint32_t odd = of[1] + __byte_perm(signs[2 * half], signs[2 * half + 1], 0x7632);
      (half ? codes[0].y : codes[0].x) = even, (half ? codes[1].y : codes[1].x) = odd;
    }
    return bytes;
  }

 private:
  /// The codes of eight magnitudes, those of one column in eight rows of pairs.
  JLP_DEVICE uint32_t codes_of_column(const uint32_t* w, int column, float encode, const uint32_t* random) {
    const auto magnitude = [&](int r) { return __fmul_rn(column ? BF16::high(w[r]) : BF16::low(w[r]), encode); };
    if constexpr (kStochastic) {
      const StochasticAddend<E2M1> addend;
      uint32_t v[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v[r] = stochastic_top_byte<E2M1>(magnitude(r), addend, random[r / 4], r % 4);
      return e2m1_of_top_bytes<true>(v);
    } else {
      uint32_t codes = 0;
#pragma unroll
      for (int r = 7; r >= 0; --r) codes = codes * 16u + e2m1_nearest_bits(magnitude(r));
      return codes - kE2M1MagicBits * 0x11111111u;
    }
  }
};

/// The block's tiles. kRotate: the columns.
template <bool kStochastic, bool kRotate>
static __global__ void __launch_bounds__(kNvfp4TileThreads, kNvfp4TileBlocks)
    quantize_nvfp4_tiles(const __grid_constant__ WholeTilesArguments a) {
  constexpr int kThreads = kNvfp4TileThreads;
  Nvfp4TilesShared<kStochastic>& shared = block_shared<Nvfp4TilesShared<kStochastic>>();
  uint32_t started = ~0u;  // the matrix whose scales are at hand
  const auto start = [&](TilePlace at, int) {
    if (at.batch != started) {
      started = at.batch;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const WholeDirection& direction = i ? a.columnwise : a.rowwise;
        if (!direction.data) continue;
        const auto matrix = Matrix<Scales::kTwoLevel>::of_amax(direction.tensor[at.batch], shared.tables[i]);
        if (threadIdx.x == 0) shared.matrices[i] = matrix;
        if constexpr (kStochastic) start_keys(direction, at.batch, shared.random[i].keys);
      }
      if constexpr (kStochastic) __syncthreads();
    }
    if constexpr (kStochastic) {
      const bool down = threadIdx.x >= kTile;
      const WholeDirection& direction = down ? a.columnwise : a.rowwise;
      const uint32_t line = down ? at.across : at.down, sixteen = down ? at.down : at.across;
      if (direction.data)
        shared.random[down].start_tile(direction.random, line * kTile, sixteen * kTileSixteens, threadIdx.x % kTile);
    }
  };
  const auto load = [&](TilePlace at, int buffer) { load_tile<kThreads, Nvfp4Place>(a.tiles, a, at, shared.tiles[buffer]); };
  each_tile<1, true>(a.tiles, load, start, [&](TilePlace at, int buffer) {
    const auto& tile = shared.tiles[buffer];
    if (a.rowwise.data) {
      constexpr int kRows = kThreads / kTileSixteens;
      const int row = threadIdx.x / kTileSixteens, sixteen = threadIdx.x % kTileSixteens;
      const int64_t line = static_cast<int64_t>(at.batch) * a.rows + at.down * kTile + row;
      uint8_t* data = a.rowwise.data + line * a.rowwise.data_row + (at.across * kTileSixteens + sixteen) * 8;
      uint8_t* scale = a.rowwise.scale + line * a.rowwise.scale_row + at.across * kTileSixteens + sixteen;
      const Nvfp4Quantizer<kStochastic> quantizer = {shared.matrices[0], shared.tables[0]};
#pragma unroll
      for (int i = 0; i < kTile / kRows; ++i) {
        Bytes random[1] = {};
        if constexpr (kStochastic) {
          const uint2 of_line[1] = {shared.random[0].lines[row + kRows * i]};
          shared.random[0].bytes(of_line, shared.random[0].sixteens[sixteen], random);
        }
        uint2 codes;
        *scale = static_cast<uint8_t>(
            quantizer.sixteen(row_sixteen<Nvfp4Place>(tile, row + kRows * i, sixteen), random[0], codes));
        *reinterpret_cast<uint2*>(data) = codes;
        data += kRows * static_cast<uint32_t>(a.rowwise.data_row),
            scale += kRows * static_cast<uint32_t>(a.rowwise.scale_row);
      }
    }
    const Nvfp4Quantizer<kStochastic> quantizer = {shared.matrices[1], shared.tables[1]};
#pragma unroll
    for (int part = 0; part < kUnits; ++part) {
      const int pair = threadIdx.x % kTilePairs, sixteen = threadIdx.x / kTilePairs + kPairThreads * part;
      const auto* words = reinterpret_cast<const uint32_t*>(&tile[16 * sixteen][Nvfp4Place::chunk(0, pair / 4)]) + pair % 4;
      uint32_t w[16], bytes;
      uint2 codes[2];
      Bytes random[2] = {};
      if constexpr (kStochastic) {
        const uint4 lines = *reinterpret_cast<const uint4*>(&shared.random[1].lines[2 * pair]);
        const uint2 of_lines[2] = {{lines.x, lines.y}, {lines.z, lines.w}};
        shared.random[1].bytes(of_lines, shared.random[1].sixteens[sixteen], random);
      }
#pragma unroll
      for (int r = 0; r < 16; ++r) w[r] = words[r * (kTile / 2)];
      if constexpr (kRotate) {
        flip_signs<BF16>(w, a.sign_mask);
        bytes = quantizer.sixteen(rotated_sixteen<BF16>(w, 0), random[0], codes[0]);
        bytes |= quantizer.sixteen(rotated_sixteen<BF16>(w, 1), random[1], codes[1]) << 8;
      } else if constexpr (kHasE2M1Conversion && !kStochastic) {
        bytes = quantizer.sixteen(Tile<BF16>::column_sixteen(w, 0), random[0], codes[0]);
        bytes |= quantizer.sixteen(Tile<BF16>::column_sixteen(w, 1), random[1], codes[1]) << 8;
      } else {
        bytes = quantizer.pair(w, random, codes);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        shared.column_scales[2 * pair + c][sixteen] = static_cast<uint8_t>(bytes >> (8 * c));
        packed_piece(shared.codes, pair, c, sixteen) = codes[c];
      }
    }
    return [&, at] {
      store_packed_columns<kThreads>(a, at, shared.codes);
      if (threadIdx.x >= kTile) return;
      const int64_t line = static_cast<int64_t>(at.batch) * a.columns + at.across * kTile + threadIdx.x;
      *reinterpret_cast<uint2*>(a.columnwise.scale + line * a.columnwise.scale_row + at.down * kTileSixteens) =
          *reinterpret_cast<const uint2*>(shared.column_scales[threadIdx.x]);
    };
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
