// Rows of codes to the lines of a K-major result: bytes are transposed in squares as wide as a vector.
#pragma once

#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kSquare = JLP_VECTOR_BYTES;
constexpr int kQuarters = JLP_VECTOR_BYTES / 16;  // runs of 16 bytes in a vector

/// Bytes of a and b in turns within each quarter: its first half, or its second.
struct InterleaveLowBytes {
  static constexpr int at(int i) { return i / 16 * 16 + i % 16 / 2 + i % 2 * kSquare; }
};
struct InterleaveHighBytes {
  static constexpr int at(int i) { return 8 + InterleaveLowBytes::at(i); }
};
/// Whole quarters of a and b in turns.
struct InterleaveLowQuarters {
  static constexpr int at(int i) { return i / 8 * 4 + i / 4 % 2 * kLanes + i % 4; }
};
struct InterleaveHighQuarters {
  static constexpr int at(int i) { return kLanes / 2 + InterleaveLowQuarters::at(i); }
};

/// A square of bytes transposed.
JLP_RULE void transpose_square(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
  U8 square[kQuarters][16];
  JLP_UNROLL(4)
  for (int q = 0; q < kQuarters; ++q) {
    U8 v[16];
    JLP_UNROLL(16)
    for (int i = 0; i < 16; ++i) v[i] = load<U8>(from + (16 * q + i) * from_stride);
    transpose_by_interleaving(
        v, [](U8 a, U8 b) { return shuffle_bytes<InterleaveLowBytes>(a, b); },
        [](U8 a, U8 b) { return shuffle_bytes<InterleaveHighBytes>(a, b); });
    JLP_UNROLL(16)
    for (int i = 0; i < 16; ++i) square[q][i] = v[i];
  }
  JLP_UNROLL(16)
  for (int i = 0; i < 16; ++i) {
    U32 v[kQuarters];
    JLP_UNROLL(4)
    for (int q = 0; q < kQuarters; ++q) v[q] = (U32)square[q][i];
    transpose_by_interleaving(
        v, [](U32 a, U32 b) { return shuffle<InterleaveLowQuarters>(a, b); },
        [](U32 a, U32 b) { return shuffle<InterleaveHighQuarters>(a, b); });
    JLP_UNROLL(4)
    for (int q = 0; q < kQuarters; ++q) store(to + (16 * q + i) * to_stride, v[q]);
  }
}

/// `rows` rows of codes to the first `bytes` bytes of `columns` lines, `stride` bytes apart. Rows and columns are read up to
/// the next multiple of kSquare.
__attribute__((noinline)) static void store_transposed(const uint8_t* codes, int64_t codes_stride, int rows, int columns,
                                                       uint8_t* data, int64_t bytes, int64_t stride) {
  alignas(64) uint8_t lines[kSquare][kColumnTileRows];
  for (int column = 0; column < columns; column += kSquare) {
    for (int row = 0; row < rows; row += kSquare)
      transpose_square(codes + row * codes_stride + column, codes_stride, &lines[0][row], sizeof lines[0]);
    for (int c = 0; c < std::min(kSquare, columns - column); ++c) store_line(data + (column + c) * stride, lines[c], bytes);
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
