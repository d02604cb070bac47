// Int4 along rows and along columns: elements to their decoded values in one pass, and to packed codes.
#pragma once

#include <vector>

#include "int4_elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- Scales and zero points of Int4 groups, kLanes of them at once, and what single groups are made of.

/// Groups side by side: kCount of them, from the extremes of each.
template <int kCount>
struct Int4Groups {
  alignas(64) float scale[kCount], inverse[kCount], most[kCount];
  alignas(64) uint32_t zero[kCount];
  bool finite = true;

  /// Groups i to i + kLanes by their extremes as float32 bits, not rounded yet.
  template <class E, class Deploy, bool kSymmetric>
  inline __attribute__((always_inline)) void compute(int i, U32 positive, U32 negative) {
    const U32 high = rounded<E, Deploy>(positive);
    Int4Group<F32> group;
    if constexpr (kSymmetric)
      group = int4_symmetric<F32, Deploy>(high);
    else
      group = int4_asymmetric<F32, Deploy>(high, rounded<E, Deploy>(negative));
    store(scale + i, group.scale), store(inverse + i, group.inverse), store(most + i, group.most);
    store(zero + i, group.zero);
    finite &= all_below(group.scale, __builtin_inff());
  }

  /// One group, in all lanes.
  inline __attribute__((always_inline)) Int4Group<F32> splat(int i) const {
    return {L::splat(scale[i]), L::splat(inverse[i]), U32{} + zero[i], L::splat(most[i])};
  }
  /// kLanes groups.
  inline __attribute__((always_inline)) Int4Group<F32> lanes(int i) const {
    return {load<F32>(scale + i), load<F32>(inverse + i), load<U32>(zero + i), load<F32>(most + i)};
  }

  /// As stored.
  template <class Deploy>
  inline __attribute__((always_inline)) void scale_bits(uint16_t (&bits)[kCount]) const {
    for (int i = 0; i < kCount; i += kLanes) store_u16(bits + i, int4_scale_bits<F32, Deploy>(load<F32>(scale + i)));
  }

 private:
  /// A magnitude's bits rounded to the deployment dtype; those of NaN and infinity are kept.
  template <class E, class Deploy>
  JLP_RULE U32 rounded(U32 bits) {
    const U32 near = L::bits(deployed<E, Deploy>(L::from_bits(bits)));
    return bits >= kInfinityBits ? bits : near;
  }
};

/// A number of the deployment dtype as an element of the result, which is of that type or float32.
template <class E, class Deploy>
JLP_RULE void store_two_steps(typename E::Storage* to, F32 a, F32 b, const Int4Group<F32>& ga, const Int4Group<F32>& gb) {
  const F32 first = (a - kInt4Integers) * ga.scale, second = (b - kInt4Integers) * gb.scale;
  if constexpr (std::is_same_v<E, Float>)
    Int4Elements<E>::store_two(to, Deploy::round(first), Deploy::round(second));
  else
    Int4Elements<E>::store_two(to, Deploy::template finite_bits<F32>(first), Deploy::template finite_bits<F32>(second));
}

template <class E>
constexpr uint32_t kElementNaN = std::is_same_v<E, Float>  ? kNaNBits
                                 : std::is_same_v<E, BF16> ? Int4BF16::kNaN
                                                           : Int4F16::kNaN;

/// Writes `count` NaNs, `stride` elements apart.
template <class E>
__attribute__((noinline)) void write_nan(typename E::Storage* to, int64_t count, int64_t stride) {
  const uint32_t bits = kElementNaN<E>;  // little-endian
  for (int64_t i = 0; i < count; ++i) memcpy(to + i * stride, &bits, sizeof *to);
}

// --- Int4 along rows: elements to their decoded values in one pass, and to packed codes.
// Bytes moved per element: fake-quantise: the element read and written; quantise: the element read, half a byte written.
//
// kLanes groups at a time: their extremes are found, a vector of scales is computed from them, then each group is encoded
// while it is still in the nearest cache. Groups that are no multiple of kStep, or that the row does not fill, are copied
// into a buffer padded with zeros, which change neither scale nor zero point.

/// How lines are cut into chunks: where groups are whole and fill bytes, one long line of groups; else whole lines.
struct Int4Runs {
  int64_t lines, length, lines_each, length_each;

  explicit Int4Runs(const Int4Matrices& m) : lines(m.lines()), length(m.length()) {
    const int64_t group = m.format.group, elements = elements_of_chunk(m.size());
    if (length % group == 0 && group % 2 == 0) length *= lines, lines = length > 0 ? 1 : 0;
    const bool one = lines == 1;
    length_each = one ? std::max<int64_t>(1, elements / group) * group : length;
    lines_each = one ? 1 : std::max<int64_t>(1, elements / std::max<int64_t>(length, 1));
  }
  int64_t chunks() const { return divide_up(lines, lines_each) * divide_up(length, std::max<int64_t>(length_each, 1)); }

  /// Calls visit(line, first element, elements) for the parts of a chunk.
  template <class Visit>
  void visit(int64_t chunk, Visit visit) const {
    if (lines == 1) return visit(0, chunk * length_each, std::min(length_each, length - chunk * length_each));
    for (int64_t line = chunk * lines_each; line < std::min((chunk + 1) * lines_each, lines); ++line) visit(line, 0, length);
  }
};

/// Two codes per byte from the k-th nibble on: `bytes` has them from its first one on. Nibbles are written in order.
inline void place_nibbles(uint8_t* line, int64_t k, const uint8_t* bytes, int64_t count) {
  if (k % 2 == 0) {
    memcpy(line + k / 2, bytes, (count + 1) / 2);
    if (count % 2) line[(k + count) / 2] &= 15;
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t code = (bytes[i / 2] >> (i % 2 * 4)) & 15;
    uint8_t& to = line[(k + i) / 2];
    to = (k + i) % 2 ? static_cast<uint8_t>(to | (code << 4)) : code;
  }
}

template <class E, class Deploy, bool kSymmetric>
struct Int4Rows {
  using Storage = typename E::Storage;
  using I = Int4Elements<E>;
  using Groups = Int4Groups<kLanes>;
  static constexpr int64_t kAhead = 4096 / sizeof(Storage);  // elements, fetched while earlier ones are encoded

  /// Scales of up to kLanes groups of `group` elements, a multiple of kStep.
  JLP_RULE void scales_of(const Storage* x, int64_t group, int count, Groups& groups) {
    U32 positive[kLanes], negative[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      Extremes<E, kSymmetric> extremes;
      for (int64_t k = 0; i < count && k < group; k += kStep) extremes.add(x + i * group + k);
      positive[i] = I::fold(extremes.positive), negative[i] = I::fold(extremes.negative);
    }
    groups.template compute<E, Deploy, kSymmetric>(0, largest(positive), kSymmetric ? U32{} : largest(negative));
  }

  /// Decoded values of `groups` groups.
  __attribute__((noinline)) static void fake_quantize(const Storage* x, int64_t groups, int64_t group, Storage* result) {
    Groups scales;
    for (; groups > 0; groups -= kLanes, x += kLanes * group, result += kLanes * group) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, groups));
      scales_of(x, group, count, scales);
      for (int i = 0; i < count; ++i) {
        const Int4Group<F32> g = scales.splat(i);
        for (int64_t k = i * group; k < (i + 1) * group; k += kStep) {
          __builtin_prefetch(x + k + kAhead);
          const Pair two = I::load_two(x + k);
          const F32 a = int4_steps<F32, kSymmetric>(deployed<E, Deploy>(two.even), g);
          const F32 b = int4_steps<F32, kSymmetric>(deployed<E, Deploy>(two.odd), g);
          store_two_steps<E, Deploy>(result + k, a, b, g, g);
        }
        if (g.scale[0] != g.scale[0]) write_nan<E>(result + i * group, group, 1);
      }
    }
  }

  /// Bytes of codes, scales and zero points of `groups` groups, each of a whole number of bytes.
  __attribute__((noinline)) static void quantize(const Storage* x, int64_t groups, int64_t group, uint8_t* data,
                                                 uint16_t* scale, uint8_t* zero) {
    Groups scales;
    for (; groups > 0; groups -= kLanes, x += kLanes * group, data += kLanes * group / 2) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, groups));
      scales_of(x, group, count, scales);
      uint16_t bits[kLanes];
      scales.template scale_bits<Deploy>(bits);
      for (int i = 0; i < count; ++i) {
        const Int4Group<F32> g = scales.splat(i);
        for (int64_t k = i * group; k < (i + 1) * group; k += kStep) {
          __builtin_prefetch(x + k + kAhead);
          const Pair two = I::load_pair(x + k);
          const U32 even = int4_encode<F32, kSymmetric>(deployed<E, Deploy>(two.even), g) & 15u;
          const U32 odd = int4_encode<F32, kSymmetric>(deployed<E, Deploy>(two.odd), g) & 15u;
          store_low_bytes(data + k / 2, even | (odd << 4));
        }
        if (g.scale[0] != g.scale[0]) memset(data + i * group / 2, static_cast<int>(g.zero[0] * 17), group / 2);
        *scale++ = bits[i];
        if (!kSymmetric) *zero++ = static_cast<uint8_t>(scales.zero[i]);
      }
    }
  }

  /// A piece of a line that starts with a group and ends with one or with the line.
  static void fake_quantize_line(const Storage* x, int64_t length, int64_t group, Storage* result) {
    const int64_t direct = group % kStep == 0 ? length / group * group : 0;
    fake_quantize(x, direct / group, group, result);
    for (int64_t first = direct; first < length; first += group) {
      const int64_t count = std::min(group, length - first), padded = divide_up(count, kStep) * kStep;
      Storage* copy = padded_copy(x + first, count, padded, padded * sizeof(Storage));
      fake_quantize(copy, 1, padded, copy + padded);
      memcpy(result + first, copy + padded, count * sizeof(Storage));
    }
  }

  /// `data` is the line's, whose byte 0 holds the piece's first code.
  __attribute__((noinline)) static void quantize_line(const Storage* x, int64_t length, int64_t group, uint8_t* data,
                                                      uint16_t* scale, uint8_t* zero) {
    const int64_t direct = group % kStep == 0 ? length / group * group : 0;
    quantize(x, direct / group, group, data, scale, zero);
    int64_t done = direct / group;
    for (int64_t first = direct; first < length; first += group, ++done) {
      const int64_t count = std::min(group, length - first), padded = divide_up(group, kStep) * kStep;
      Storage* copy = padded_copy(x + first, count, padded, padded);
      uint8_t* codes = reinterpret_cast<uint8_t*>(copy + padded);
      uint8_t none = kInt4Middle;
      uint8_t& own = kSymmetric ? none : zero[done];
      quantize(copy, 1, padded, codes, scale + done, &own);
      place_nibbles(data, first, codes, group);
      if (const int64_t codes_done = first + group; codes_done % 2 && first + count == length)
        data[codes_done / 2] = static_cast<uint8_t>((data[codes_done / 2] & 15) | (own << 4));
    }
  }

 private:
  /// For each of kLanes vectors of element bits the largest lane, as float32 bits.
  JLP_RULE U32 largest(U32 (&v)[kLanes]) {
    transpose(v);
    JLP_UNROLL(16)
    for (int i = 1; i < kLanes; ++i) v[0] = max_magnitude(v[0], v[i]);
    return I::float_bits(v[0]);
  }

  /// The elements in the thread's scratch memory, padded with zeros, and `more` bytes after them.
  static Storage* padded_copy(const Storage* x, int64_t count, int64_t padded, int64_t more) {
    Storage* copy = reinterpret_cast<Storage*>(thread_scratch(padded * sizeof(Storage) + more));
    memcpy(copy, x, count * sizeof(Storage));
    memset(copy + count, 0, (padded - count) * sizeof(Storage));
    return copy;
  }
};

// --- Int4 along columns: decoded values in one pass without a transposition, packed codes through transposed tiles.
// Bytes moved per element: as along rows. A tile's elements are read twice, the second time from the cache.
//
// Lanes are columns, each with its own scale. Codes of two rows meet in a byte; 16 rows of 16 such bytes are transposed into
// the lines of the K-major result. The rest (groups that are not a multiple of 32 rows, tiles at the edges of the
// matrix) is transposed element by element and handled as rows.

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
