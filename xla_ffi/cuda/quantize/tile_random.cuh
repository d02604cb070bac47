// The random bytes of a tile's lines in one direction (numerics.md 4). Philox's counter is (sixteen, line, stream, 0), so
// its first rounds do much of their work for all sixteens of a line, or for all lines of a sixteen, which is done once a
// tile:
//
//   round 1: the product of `stream` is one for all, that of the sixteen's index belongs to the sixteen
//   round 2: word 0 depends on the line alone, word 2 on the sixteen alone, and so do their products
//   round 3: word 0 depends on the sixteen alone; the product of word 2 is left, and all of rounds 4 to 10
//
// 15 of the 20 wide products are left to each sixteen of a line, and one for each line and three for each sixteen of a tile.
#pragma once

#include "quantize_scales.cuh"
#include "tile.cuh"

namespace jaxlowprec {
namespace cuda {

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

}  // namespace cuda
}  // namespace jaxlowprec
