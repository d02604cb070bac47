// AMX's tiles, registers of 16 rows of 64 bytes: how they are configured, and how they multiply signed bytes.
//
// tdpbssd adds to a tile of 16 rows by 16 lanes of int32 the products of 16 rows of 64 codes and 16 quads by 16 lanes: just
// as matmul_steps.h has rows, a panel and sums in memory. g++ has no operands for tiles, so intrinsics name them by number.
#pragma once

#include "matmul_chunks.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int64_t kTileDepth = 64, kTileHeight = 16;

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

/// Codes along K that a tile takes: a group's sum needs tiles of its own.
inline int64_t tile_depth(const Format& b) { return b.packed() ? std::min<int64_t>(b.block, kTileDepth) : kTileDepth; }

/// All eight tiles, for as long as it lives: released, they are not saved when threads change. 0 to 3 are sums, 4 and 5 have
/// rows of kTileDepth or kTileDepth / 2 codes, 6 and 7 as many quads.
class Tiles {
 public:
  explicit Tiles(int64_t depth) {
    alignas(64) static constexpr TileConfig kWhole = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    alignas(64) static constexpr TileConfig kHalf = {
        1, 0, {}, {64, 64, 64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 8, 8}};
    if (depth == kTileDepth)
      _tile_loadconfig(&kWhole);
    else
      _tile_loadconfig(&kHalf);
  }
  ~Tiles() { _tile_release(); }
};

/// sums = a * b, or with kAdds sums += a * b, over `depth`, rounded up to whole tiles of `step` codes, for kTall ? 32 : 16
/// rows by two vectors. `b_next` and `sums_next`: words from one vector to the next.
template <bool kTall, bool kAdds, int kLines>
JLP_RULE void multiply_tiles(const uint32_t* a, int64_t row_bytes, const uint32_t* b, int64_t b_next, int32_t* sums,
                             int64_t sums_next, int64_t depth, int64_t step, Ahead<kLines>& next) {
  const uint8_t* rows = reinterpret_cast<const uint8_t*>(a);
  constexpr int64_t kWords = kTileHeight * kLanes;  // of a tile
  asm volatile("" ::: "memory");                    // what g++ 12 has for a tile's load does not say that it reads memory
  if constexpr (kAdds) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + sums_next, 64);
    if constexpr (kTall) {
      _tile_loadd(2, sums + kWords, 64);
      _tile_loadd(3, sums + sums_next + kWords, 64);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTall) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t k = 0; k < depth; k += step, b += step / 4 * kLanes) {
    next.fetch();
    _tile_loadd(4, rows + k, row_bytes);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + b_next, 64);
    _tile_dpbssd(0, 4, 6);
    if constexpr (kTall) _tile_loadd(5, rows + kTileHeight * row_bytes + k, row_bytes);
    _tile_dpbssd(1, 4, 7);
    if constexpr (kTall) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + sums_next, 64);
  if constexpr (kTall) {
    _tile_stored(2, sums + kWords, 64);
    _tile_stored(3, sums + sums_next + kWords, 64);
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
