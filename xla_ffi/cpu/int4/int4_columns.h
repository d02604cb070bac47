// Int4 along columns: decoded values in one pass without a transposition, packed codes through transposed tiles.
// Bytes moved per element: as along rows. A tile's elements are read twice, the second time from the cache.
//
// Lanes are columns, each with its own scale. Codes of two rows meet in a byte; 16 rows of 16 such bytes are transposed into
// the lines of the K-major result. The rest (groups that are not a multiple of 32 rows, tiles at the edges of the
// matrix) is transposed element by element and handled as rows.
#pragma once

#include <vector>

#include "int4_rows.h"
#include "int4_tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

template <class E, class Deploy, bool kSymmetric>
struct Int4Columns {
  using Storage = typename E::Storage;
  using I = Int4Elements<E>;
  using Groups = Int4Groups<kStrip>;

  /// Scales of kStrip columns, one group of rows `stride` elements apart; in the order in which two vectors are loaded.
  JLP_RULE void scales_of(const Storage* x, int64_t stride, int64_t rows, Groups& groups) {
    Extremes<E, kSymmetric> extremes[kStrip / kStep];
    for (int64_t r = 0; r < rows; ++r)
      for (int j = 0; j < kStrip / kStep; ++j) extremes[j].add(x + r * stride + j * kStep);
    groups.finite = true;
    for (int j = 0; j < kStrip / kStep; ++j) {
      U32 high[2], low[2] = {};
      I::two_float_bits(extremes[j].positive, high[0], high[1]);
      if (!kSymmetric) I::two_float_bits(extremes[j].negative, low[0], low[1]);
      for (int i = 0; i < 2; ++i) groups.template compute<E, Deploy, kSymmetric>(j * kStep + i * kLanes, high[i], low[i]);
    }
  }

  /// kStrip columns of one group.
  __attribute__((noinline, noclone)) static void fake_quantize(const Storage* x, int64_t stride, int64_t rows,
                                                               Storage* result, int64_t result_stride) {
    Groups groups;
    scales_of(x, stride, rows, groups);
    for (int64_t r = 0; r < rows; ++r)
      for (int j = 0; j < kStrip; j += kStep) {
        const Int4Group<F32> ga = groups.lanes(j), gb = groups.lanes(j + kLanes);
        const Pair two = I::load_two(x + r * stride + j);
        const F32 a = int4_steps<F32, kSymmetric>(deployed<E, Deploy>(two.even), ga);
        const F32 b = int4_steps<F32, kSymmetric>(deployed<E, Deploy>(two.odd), gb);
        store_two_steps<E, Deploy>(result + r * result_stride + j, a, b, ga, gb);
      }
    if (groups.finite) return;
    for (int j = 0; j < kStrip; ++j)
      if (const int i = place(j); groups.scale[i] != groups.scale[i]) write_nan<E>(result + j, rows, result_stride);
  }

  static void fake_quantize_tile(const Int4FakeQuantizeProblem& p, int64_t batch, const Int4Tile& tile) {
    const int64_t at = (batch * p.rows + tile.row) * p.columns + tile.column;
    const Storage* x = static_cast<const Storage*>(p.x) + at;
    Storage* result = static_cast<Storage*>(p.result) + at;
    if (tile.columns == kStrip) return fake_quantize(x, p.columns, tile.rows, result, p.columns);
    const int64_t size = tile.rows * kStrip;
    Storage* copy = reinterpret_cast<Storage*>(thread_scratch(size * sizeof(Storage)));
    memset(copy, 0, size * sizeof(Storage));
    for (int64_t r = 0; r < tile.rows; ++r) memcpy(copy + r * kStrip, x + r * p.columns, tile.columns * sizeof(Storage));
    fake_quantize(copy, kStrip, tile.rows, copy, kStrip);
    for (int64_t r = 0; r < tile.rows; ++r)
      memcpy(result + r * p.columns, copy + r * kStrip, tile.columns * sizeof(Storage));
  }

  /// Tiles side by side.
  static void quantize_tiles(const Int4QuantizeProblem& p, int64_t batch, const Int4Tile& all) {
    const int64_t end = all.column + all.columns;
    for (Int4Tile tile = all; tile.column < end; tile.column += kStrip) {
      tile.columns = std::min<int64_t>(kStrip, end - tile.column);
      const int64_t line = batch * p.columns + tile.column, first = line * p.groups() + tile.row / p.format.group;
      const Storage* x = static_cast<const Storage*>(p.x) + (batch * p.rows + tile.row) * p.columns + tile.column;
      uint8_t* data = p.data + line * p.line_bytes() + tile.row / 2;
      uint8_t* zero = kSymmetric ? nullptr : p.zero + first;
      if (tile.whole(p))
        quantize_whole(x, p, tile, data, p.scale + first, zero);
      else
        quantize_transposed(x, p, tile, data, p.scale + first, zero);
    }
  }

 private:
  /// Where the j-th column's scale is.
  static int place(int j) {
    if (!std::is_same_v<E, BF16>) return j;
    return j / kStep * kStep + j % 2 * kLanes + j % kStep / 2;
  }

  /// kStrip columns of whole groups. They are read from a copy, in which rows lie together (rows of a matrix whose stride is
  /// a power of two fall into the same few cache sets), while those of the next tile are fetched.
  static void quantize_whole(const Storage* x, const Int4QuantizeProblem& p, const Int4Tile& tile, uint8_t* data,
                             uint16_t* scale, uint8_t* zero) {
    constexpr int kMost = 64;  // bytes of a line at a time
    const int64_t group = p.format.group, stride = p.columns;
    Storage* copy = reinterpret_cast<Storage*>(thread_scratch(tile.rows * kStrip * sizeof(Storage)));
    for (int64_t r = 0; r < tile.rows; ++r) copy_row(x + r * stride, kBlock * stride, copy + r * kStrip);
    alignas(64) uint8_t codes[kMost][kStrip];
    int bytes = 0;  // of a line that are in `codes`
    Groups groups;
    for (int64_t row = 0; row < tile.rows; row += group) {
      scales_of(copy + row * kStrip, kStrip, group, groups);
      for (int64_t r = row; r < row + group; r += 32, bytes += 16) {
        if (bytes == kMost) {
          store_transposed(codes[0], kStrip, bytes, kStrip, data, bytes, p.line_bytes());
          data += bytes, bytes = 0;
        }
        encode_32_rows(copy + r * kStrip, groups, x + r * stride + kStrip, stride, &codes[bytes]);
      }
      store_scales(groups, p.groups(), scale++, kSymmetric ? nullptr : zero++);
    }
    store_transposed(codes[0], kStrip, bytes, kStrip, data, bytes, p.line_bytes());
  }

  JLP_RULE void fetch_row(const Storage* x) {
    for (size_t line = 0; line < kStrip * sizeof *x; line += 64) __builtin_prefetch(reinterpret_cast<const char*>(x) + line);
  }

  JLP_RULE void copy_row(const Storage* x, int64_t ahead, Storage* to) {
    fetch_row(x + ahead);
    JLP_UNROLL(8)
    for (int i = 0; i < kStrip; i += static_cast<int>(JLP_VECTOR_BYTES / sizeof *x)) store(to + i, load<U32>(x + i));
  }

  /// The scales and zero points of a strip's columns, `stride` groups apart.
  static void store_scales(const Groups& groups, int64_t stride, uint16_t* scale, uint8_t* zero) {
    uint16_t bits[kStrip];
    groups.template scale_bits<Deploy>(bits);
    for (int j = 0; j < kStrip; ++j) scale[j * stride] = bits[place(j)];
    if (kSymmetric) return;
    for (int j = 0; j < kStrip; ++j) zero[j * stride] = static_cast<uint8_t>(groups.zero[place(j)]);
  }

  /// The codes of 32 rows, a byte for two of them; `ahead` is fetched meanwhile.
  static void encode_32_rows(const Storage* x, const Groups& groups, const Storage* ahead, int64_t ahead_stride,
                             uint8_t (*codes)[kStrip]) {
    for (int r = 0; r < 16; ++r, x += 2 * kStrip, ahead += 2 * ahead_stride) {
      fetch_row(ahead), fetch_row(ahead + ahead_stride);
      JLP_UNROLL(4)
      for (int j = 0; j < kStrip; j += kStep) {
        const Int4Group<F32> ga = groups.lanes(j), gb = groups.lanes(j + kLanes);
        const auto code = [&](F32 v, const Int4Group<F32>& g) {
          return int4_encode<F32, kSymmetric>(deployed<E, Deploy>(v), g) & 15u;
        };
        const Pair one = I::load_two(x + j), next = I::load_two(x + kStrip + j);
        I::store_two_bytes(&codes[r][j], code(one.even, ga) | (code(next.even, ga) << 4),
                           code(one.odd, gb) | (code(next.odd, gb) << 4));
      }
    }
    if (groups.finite) return;
    for (int j = 0; j < kStrip; ++j)  // a group that holds NaN or infinity has the code of zero everywhere
      if (const int i = place(j); groups.scale[i] != groups.scale[i])
        for (int r = 0; r < 16; ++r) codes[r][j] = static_cast<uint8_t>(groups.zero[i] * 17);
  }

  /// Column by column as rows. Not fast.
  static void quantize_transposed(const Storage* x, const Int4QuantizeProblem& p, const Int4Tile& tile, uint8_t* data,
                                  uint16_t* scale, uint8_t* zero) {
    std::vector<Storage> line(tile.rows);
    for (int64_t j = 0; j < tile.columns; ++j) {
      for (int64_t r = 0; r < tile.rows; ++r) line[r] = x[r * p.columns + j];
      Int4Rows<E, Deploy, kSymmetric>::quantize_line(line.data(), tile.rows, p.format.group, data + j * p.line_bytes(),
                                                     scale + j * p.groups(), zero ? zero + j * p.groups() : nullptr);
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
