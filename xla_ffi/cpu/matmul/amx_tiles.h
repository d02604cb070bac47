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

/// All eight tiles as they are by default, for as long as it lives: released, they are not saved when threads change.
class Tiles {
 public:
  Tiles() {
    alignas(64) static constexpr TileConfig kConfig = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&kConfig);
  }
  ~Tiles() { _tile_release(); }
};

/// sums += a * b over `depth`, rounded up to kTileDepth, for kTall ? 32 : 16 rows by two vectors. `b_next` and `sums_next`:
/// words from one vector to the next.
template <bool kTall, int kLines>
JLP_RULE void multiply_tiles(const uint32_t* a, int64_t row_bytes, const uint32_t* b, int64_t b_next, int32_t* sums,
                             int64_t sums_next, int64_t depth, Ahead<kLines>& next) {
  const uint8_t* rows = reinterpret_cast<const uint8_t*>(a);
  constexpr int64_t kWords = kTileHeight * kLanes;  // of a tile
  asm volatile("" ::: "memory");                    // what g++ 12 has for a tile's load does not say that it reads memory
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + sums_next, 64);
  if constexpr (kTall) {
    _tile_loadd(2, sums + kWords, 64);
    _tile_loadd(3, sums + sums_next + kWords, 64);
  }
  for (int64_t k = 0; k < depth; k += kTileDepth, b += kWords) {
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
