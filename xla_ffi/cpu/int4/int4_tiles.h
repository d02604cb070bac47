// How a matrix quantised along its columns is cut into tiles.
#pragma once

#include "../quantize/codes.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kStrip = 128;  // columns of a tile

/// How a matrix quantised along its columns is cut into tiles of whole groups by kStrip columns. A line whose groups share
/// bytes is one tile's.
struct Int4Tiles {
  int64_t rows_each, strips, tiles;

  Int4Tiles(const Int4Matrices& m, bool packed) {
    const int64_t group = m.format.group;
    const bool shared = packed && group % 2;
    rows_each = shared ? std::max<int64_t>(m.groups(), 1) * group : std::max<int64_t>(1, (packed ? 128 : 1) / group) * group;
    strips = divide_up(m.columns, kStrip);
    tiles = strips * divide_up(m.rows, rows_each);
  }
};

/// One of them, as far as it lies in the matrix.
struct Int4Tile {
  int64_t row, column, rows, columns;

  Int4Tile(const Int4Matrices& m, const Int4Tiles& tiles, int64_t chunk) {
    row = chunk / tiles.strips * tiles.rows_each, column = chunk % tiles.strips * kStrip;
    rows = std::min(tiles.rows_each, m.rows - row), columns = std::min<int64_t>(kStrip, m.columns - column);
  }
  bool whole(const Int4Matrices& m) const {
    return columns == kStrip && rows % m.format.group == 0 && m.format.group % 32 == 0;
  }
};

/// The bytes of 16 pairs of rows of a strip to as many bytes of each column's line, and back. Not inlined: every type of
/// elements shares them.
__attribute__((noinline)) static void codes_to_lines(const uint8_t (*codes)[kStrip], uint8_t* lines, int64_t line_bytes) {
  for (int j = 0; j < kStrip; j += 16) transpose_bytes(&codes[0][j], kStrip, lines + j * line_bytes, line_bytes);
}
__attribute__((noinline)) static void lines_to_codes(const uint8_t* lines, int64_t line_bytes, uint8_t (*codes)[kStrip]) {
  for (int j = 0; j < kStrip; j += 16) transpose_bytes(lines + j * line_bytes, line_bytes, &codes[0][j], kStrip);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
