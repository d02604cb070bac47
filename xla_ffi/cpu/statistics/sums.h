// What quantisation did to an array: counts and sums of its elements beside what their codes decode to.
//
// A part is 128 lines, which blocks lie along. 256 elements of a line are brought to float32 in the cache (columns by
// transposing 256 rows of the part at a time), then counted with their codes by count_elements.h.
// Bytes moved per element: the element and its code read.
#pragma once

#include <algorithm>
#include <new>

#include "../kernels.h"
#include "count_elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- The ranges of runs, elements that share a scale: the largest magnitude over the median.

/// Magnitudes of a run: those in the middle of the ascending order, and the largest.
template <class U>
struct Middle {
  U below, above, largest;
};

/// Each lane's numbers in ascending order, by Batcher's network.
template <int kCount>
void sort_lanes(U32 (&v)[kCount]) {
  for (int merged = 1; merged < kCount; merged *= 2)
    for (int distance = merged; distance >= 1; distance /= 2)
      for (int start = distance % merged; start + distance < kCount; start += 2 * distance)
        for (int i = start; i < start + distance && i + distance < kCount; ++i) {
          if ((i ^ (i + distance)) >= 2 * merged) continue;
          const U32 a = v[i], b = v[i + distance], most = max_magnitude(a, b);
          v[i] = a ^ b ^ most, v[i + distance] = most;
        }
}

/// Of as many runs as there are lanes; of those that do not exist, zeros.
template <int kRun>
Middle<U32> find_middles(const float* x, int runs) {
  U32 sizes[kRun];
  for (int k = 0; k < kRun; k += kLanes) {
    U32 square[kLanes];
    for (int run = 0; run < kLanes; ++run)
      square[run] = run < runs ? finite_magnitude(load<F32>(x + run * kRun + k)) : U32{};
    transpose(square);
    for (int i = 0; i < kLanes; ++i) sizes[k + i] = square[i];
  }
  sort_lanes(sizes);
  return {sizes[kRun / 2 - 1], sizes[kRun / 2], sizes[kRun - 1]};
}

/// Of one run, by how many are less than each.
inline Middle<uint32_t> find_middle(const float* x, int run) {
  alignas(64) uint32_t sizes[kRangeRun];
  for (int k = 0; k < run; k += kLanes) store(sizes + k, finite_magnitude(load<F32>(x + k)));
  const uint32_t middle = run / 2;
  U32 most_below = U32{}, most_above = U32{}, most = U32{};
  for (int k = 0; k < run; k += kLanes) {
    const U32 size = load<U32>(sizes + k);
    U32 smaller = U32{};
    for (int j = 0; j < run; ++j) smaller = one_more(smaller, less(fill<F32>(sizes[j]), size));
    most_below = max_magnitude(most_below, smaller < middle ? size : U32{});
    most_above = max_magnitude(most_above, smaller <= middle ? size : U32{});
    most = max_magnitude(most, size);
  }
  return {max_lane(most_below), max_lane(most_above), max_lane(most)};
}

/// Each lane a run; those whose median is zero do not count.
inline void add_ranges(const Middle<U32>& found, float unit, Counted& counted) {
  const F32 median = L::from_bits(found.below) * unit / 2 + L::from_bits(found.above) * unit / 2;
  const Which spread = not_zero(L::bits(L::flush(median)));
  counted.ranges.add(keep(L::from_bits(found.largest) * unit / median, spread));
  counted.runs = one_more(counted.runs, spread);
}

/// Of a line's whole runs.
inline void count_ranges(int run, const Line& line, float unit, Counted& counted) {
  const int runs = line.length / run;
  for (int at = 0; at < runs; at += kLanes) {
    Middle<U32> found = {};
    const float* x = line.x + at * run;
    const int here = std::min(kLanes, runs - at);
    if (run == 16) {
      found = find_middles<16>(x, here);
    } else if (run == 32) {
      found = find_middles<32>(x, here);
    } else {
      for (int i = 0; i < here; ++i) {
        const Middle<uint32_t> one = find_middle(x + i * run, run);
        found.below[i] = one.below, found.above[i] = one.above, found.largest[i] = one.largest;
      }
    }
    add_ranges(found, unit, counted);
  }
}

/// Lines that lie together in memory, 256 elements of each, in the cache. In scratch memory.
struct Part {
  static constexpr int kStride = Line::kLength + 16;  // columns do not begin in the same cache sets
  int lines;                                          // that exist
  alignas(64) float columns[kSumsLines][kStride];     // of a columnwise problem, transposed
  alignas(64) float row[Line::kLength];               // of a rowwise one
  Line line;
  uint32_t used[kSumsLines];  // see Line
};

struct Sums {
  static int64_t chunks_per_matrix(const SumsProblem& p) { return p.parts(); }

  static void chunk(const SumsProblem& p, int64_t batch, int64_t chunk) {
    Part& part = *new (thread_scratch(sizeof(Part))) Part;
    Counted counted;
    const int64_t first = chunk * kSumsLines, last = std::min(first + kSumsLines, p.lines());
    const Codes codes(p, batch);
    // Lines that lie together in memory are read one after the other.
    const int64_t together = p.columnwise || p.format.tiles ? kSumsLines : 1;
    with_element(p.type, [&](auto element) {
      for (int64_t line = first; line < last; line += together) {
        part.lines = static_cast<int>(std::min(together, last - line));
        count_lines<decltype(element)>(p, batch, line, codes, part, counted);
      }
    });
    count_codes(p.format, codes.at(first, 0), (last - first) * codes.line_bytes, counted.codes);
    const int64_t stored = codes.line_bytes * (p.format.packed() ? 2 : 1);
    counted.codes[0] -= (last - first) * (stored - p.length());  // zeros behind the lines
    counted.store(p.unit[batch], p.result + (batch * chunks_per_matrix(p) + chunk) * kSums);
  }

 private:
  /// Where a matrix's codes and scales are.
  struct Codes {
    const Format& f;
    const uint8_t *data, *scale;
    int64_t line_bytes, scale_line_bytes;
    int block_shift;  // a block's length is a power of two

    Codes(const SumsProblem& p, int64_t batch) : f(p.format), line_bytes(f.row_bytes(p.length())) {
      data = p.data + batch * p.lines() * line_bytes;
      scale = p.scale + batch * f.scales(p.lines(), p.length()) * f.scale_bytes();
      const bool tensor = f.scaling == Scaling::kTensor;
      scale_line_bytes = tensor ? 0 : f.scale_columns(p.length()) * f.scale_bytes();
      block_shift = tensor ? 31 : __builtin_ctz(f.block);
    }
    const uint8_t* at(int64_t line, int64_t k) const { return data + line * line_bytes + (f.packed() ? k / 2 : k); }
    /// The scale of a line's element, and so of the blocks behind it.
    const uint8_t* scale_at(int64_t line, int64_t k) const {
      return scale + (f.tiles ? line >> block_shift : line) * scale_line_bytes + (k >> block_shift) * f.scale_bytes();
    }
  };

  template <class E>
  static void count_lines(const SumsProblem& p, int64_t batch, int64_t first, const Codes& codes, Part& part,
                          Counted& counted) {
    const bool tensor = p.format.scaling == Scaling::kTensor;
    const float unit = p.unit[batch], *amax = p.amax ? p.amax + batch : nullptr;
    Line& line = part.line;
    bool used[kSumsLines] = {};
    for (int64_t at = 0; at < p.length(); at += Line::kLength) {
      line.length = static_cast<int>(std::min<int64_t>(Line::kLength, p.length() - at));
      if (p.columnwise) load_columns<E>(p, batch, first, at, part);
      for (int i = 0; i < part.lines; ++i) {
        line.x = part.columns[i];
        if (!p.columnwise) load_row<E>(p, batch, first + i, at, part);
        load_codes(codes, first + i, at, line), load_scales(codes, first + i, at, line);
        count_line(p.format, amax, unit, line, counted);
        part.used[i] = line.used, used[i] |= line.used != 0;
        if ((first + i) % kRangeEvery == 0) count_ranges(run_of(p.format), line, unit, counted);
      }
      if (!tensor) count_scales(codes, first, at, part, counted);
    }
    for (int i = 0; tensor && i < part.lines; ++i)
      if (used[i]) ++counted.scales[0][scale_bin(p.format, codes.scale)];
  }

  static int run_of(const Format& f) { return f.scaling == Scaling::kTensor ? kRangeRun : f.block; }
  static int blocks_of(const Format& f, const Line& line) { return static_cast<int>(divide_up(line.length, run_of(f))); }

  template <class E>
  static void load_row(const SumsProblem& p, int64_t batch, int64_t row, int64_t at, Part& part) {
    const auto* x = static_cast<const typename E::Storage*>(p.x) + (batch * p.rows + row) * p.columns + at;
    int k = 0;
    for (; k + kLanes <= part.line.length; k += kLanes) store(&part.row[k], E::load_lanes(x + k));
    for (; k < Line::kLength; k += kLanes) {
      const int count = std::clamp(part.line.length - k, 0, kLanes);
      store(&part.row[k], count ? load_elements(x, p.type, k, count) : F32{});
    }
    part.line.x = part.row;
  }

  /// Elements of 16 bits: two columns a word.
  template <class E>
  static void load_pairs_of_columns(const typename E::Storage* x, int64_t stride, int k, float (*columns)[Part::kStride]) {
    U32 square[kLanes];
    JLP_UNROLL(16)
    for (int r = 0; r < kLanes; ++r) square[r] = load<U32>(x + r * stride);
    transpose(square);
    JLP_UNROLL(16)
    for (int c = 0; c < kLanes; ++c) {
      uint16_t words[2 * kLanes];
      store(words, square[c]);
      const Pair pair = E::load_pair(words);
      store(&columns[2 * c][k], pair.even), store(&columns[2 * c + 1][k], pair.odd);
    }
  }

  template <class E>
  static void load_columns(const SumsProblem& p, int64_t batch, int64_t line, int64_t at, Part& part) {
    const auto* x = static_cast<const typename E::Storage*>(p.x) + (batch * p.rows + at) * p.columns + line;
    for (int k = 0; k < Line::kLength; k += kLanes) {
      const bool whole = k + kLanes <= part.line.length;
      int i = 0;
      if constexpr (sizeof(typename E::Storage) == 2) {
        for (; whole && i + 2 * kLanes <= part.lines; i += 2 * kLanes)
          load_pairs_of_columns<E>(x + k * p.columns + i, p.columns, k, &part.columns[i]);
      }
      for (; i < part.lines; i += kLanes) {
        const int count = std::min(kLanes, part.lines - i);
        U32 square[kLanes];
        if (count == kLanes && whole) {
          JLP_UNROLL(16)
          for (int r = 0; r < kLanes; ++r) square[r] = L::bits(E::load_lanes(x + (k + r) * p.columns + i));
        } else {
          for (int r = 0; r < kLanes; ++r)
            square[r] = k + r < part.line.length ? L::bits(load_elements(x, p.type, (k + r) * p.columns + i, count)) : U32{};
        }
        transpose(square);
        for (int c = 0; c < count; ++c) store(&part.columns[i + c][k], square[c]);
      }
    }
  }

  /// A line's codes, one a byte.
  static void load_codes(const Codes& of, int64_t index, int64_t at, Line& line) {
    const uint8_t* codes = of.at(index, at);
    const bool packed = of.f.packed(), whole = line.length == Line::kLength;
    const int bytes = packed ? (line.length + 1) / 2 : line.length;
    alignas(64) uint8_t padded[Line::kLength];
    if (!whole) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, codes, bytes);
      codes = padded;
    }
    if (packed) {
      unpack_codes(codes, line.buffer);
    } else if (!whole) {
      memcpy(line.buffer, padded, sizeof padded);
    }
    line.codes = packed || !whole ? line.buffer : codes;
  }

  /// Two to a byte.
  static void unpack_codes(const uint8_t* codes, uint8_t* to) {
    for (int b = 0; b < Line::kLength / 2; b += 16) {
      const Bytes16 two = load<Bytes16>(codes + b), low = two & 15, high = two >> 4;
      store(to + 2 * b, interleave_low_bytes(low, high));
      store(to + 2 * b + 16, interleave_high_bytes(low, high));
    }
  }

  /// Its scales, one for each 16.
  static void load_scales(const Codes& of, int64_t index, int64_t at, Line& line) {
    const Format& f = of.f;
    const uint8_t* scale = of.scale_at(index, at);
    const int blocks = static_cast<int>(divide_up(line.length, kBlock));
    const int shift = f.scaling == Scaling::kTensor ? 31 : of.block_shift - __builtin_ctz(kBlock);
    alignas(64) uint32_t bits[Line::kBlocks] = {};
    if (f.scale_bytes() == 1 && blocks == Line::kBlocks && shift == 0)
      for (int i = 0; i < blocks; i += kLanes) store(bits + i, load_u8(scale + i));
    else if (f.scale_bytes() == 1)
      for (int i = 0; i < blocks; ++i) bits[i] = scale[i >> shift];
    else
      for (int i = 0; i < blocks; ++i) memcpy(&bits[i], scale + (i >> shift) * sizeof(float), sizeof(float));
    for (int i = 0; i < Line::kBlocks; i += kLanes) {
      const U32 v = load<U32>(bits + i);
      store(line.scales + i, f.scaling == Scaling::kTwoLevel ? float8_decode<E4M3, F32>(v)
                             : f.scaling == Scaling::kE8M0   ? e8m0_decode<F32>(v)
                                                             : L::flush(L::from_bits(v)));
    }
  }

  static int scale_bin(const Format& f, const uint8_t* scale) {
    if (f.scale_bytes() == 1) return *scale;
    uint32_t bits;
    memcpy(&bits, scale, sizeof bits);
    return bits >> 23 & 0xFF;
  }

  static void count_scales(const Codes& of, int64_t line, int64_t at, const Part& part, Counted& counted) {
    const Format& f = of.f;
    const int together = f.tiles ? f.block : 1, bytes = static_cast<int>(f.scale_bytes());
    const int sixteens = f.block / kBlock, blocks = blocks_of(f, part.line);
    const uint64_t of_block = (1u << sixteens) - 1, every = (1u << divide_up(part.line.length, kBlock)) - 1;
    for (int i = 0; i < part.lines; i += together) {
      const uint8_t* scale = of.scale_at(line + i, at);
      uint64_t used = 0;
      for (int k = i; k < std::min(i + together, part.lines); ++k) used |= part.used[k];
      int b = 0;
      for (; bytes == 1 && used == every && b + 8 <= blocks; b += 8) {
        const uint64_t eight = load<uint64_t>(scale + b);
        for (int j = 0; j < 8; ++j) ++counted.scales[j % 4][eight >> (8 * j) & 0xFF];
      }
      for (used >>= b * sixteens; b < blocks; ++b, used >>= sixteens)
        if (used & of_block) ++counted.scales[0][scale_bin(f, scale + b * bytes)];
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
