// Int4 along rows: elements to their decoded values in one pass, and to packed codes.
// Bytes moved per element: fake-quantise: the element read and written; quantise: the element read, half a byte written.
//
// kLanes groups at a time: their extremes are found, a vector of scales is computed from them, then each group is encoded
// while it is still in the nearest cache. Groups that are no multiple of kStep, or that the row does not fill, are copied
// into a buffer padded with zeros, which change neither scale nor zero point.
#pragma once

#include "int4_groups.h"

namespace jaxlowprec {
namespace JLP_ISA {

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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
