// How a matrix quantised along its columns is cut into tiles.
#pragma once

#include "../quantize/codes.h"
#include "../quantize/lines.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kStrip = 128;  // columns of a tile

/// How a matrix quantised along its columns is cut into tiles of whole groups by kStrip columns. A line whose groups share
/// bytes is one tile's.
struct Int4Tiles {
  int64_t rows_each, strips, tiles;

  /// `strip`: columns of a tile.
  Int4Tiles(const Int4Matrices& m, bool packed, int64_t strip = kStrip) {
    const int64_t group = m.format.group;
    const bool shared = packed && group % 2;
    rows_each = shared ? std::max<int64_t>(m.groups(), 1) * group : std::max<int64_t>(1, (packed ? 128 : 1) / group) * group;
    strips = divide_up(m.columns, strip);
    tiles = strips * divide_up(m.rows, rows_each);
  }
};

/// One of them, as far as it lies in the matrix.
struct Int4Tile {
  int64_t row, column, rows, columns;

  Int4Tile(const Int4Matrices& m, const Int4Tiles& tiles, int64_t chunk, int64_t strip = kStrip) {
    row = chunk / tiles.strips * tiles.rows_each, column = chunk % tiles.strips * strip;
    rows = std::min(tiles.rows_each, m.rows - row), columns = std::min<int64_t>(strip, m.columns - column);
  }
  bool whole(const Int4Matrices& m) const {
    return columns == kStrip && rows % m.format.group == 0 && m.format.group % 32 == 0;
  }
};

/// 16 bytes of each line of a strip to as many rows of codes. Not inlined: every type of elements shares it.
__attribute__((noinline)) static void lines_to_codes(const uint8_t* lines, int64_t line_bytes, uint8_t (*codes)[kStrip]) {
  for (int j = 0; j < kStrip; j += 16) transpose_bytes(lines + j * line_bytes, line_bytes, &codes[0][j], kStrip);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
