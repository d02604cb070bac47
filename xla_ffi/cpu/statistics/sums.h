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
    // Lines that lie together in memory are read one after the other.
    const int64_t together = p.columnwise || p.format.tiles ? kSumsLines : 1;
    for (int64_t line = first; line < last; line += together) {
      part.lines = static_cast<int>(std::min(together, last - line));
      count_lines(p, batch, line, part, counted);
    }
    counted.store(p.format, p.result + (batch * chunks_per_matrix(p) + chunk) * kSums);
  }

 private:
  static void count_lines(const SumsProblem& p, int64_t batch, int64_t first, Part& part, Counted& counted) {
    const bool tensor = p.format.scaling == Scaling::kTensor;
    const float unit = p.unit[batch], *amax = p.amax ? p.amax + batch : nullptr;
    Line& line = part.line;
    bool used[kSumsLines] = {};
    for (int64_t at = 0; at < p.length(); at += Line::kLength) {
      line.length = static_cast<int>(std::min<int64_t>(Line::kLength, p.length() - at));
      if (p.columnwise)
        with_element(p.type, [&](auto element) { load_columns<decltype(element)>(p, batch, first, at, part); });
      for (int i = 0; i < part.lines; ++i) {
        line.x = part.columns[i];
        if (!p.columnwise)
          with_element(p.type, [&](auto element) { load_row<decltype(element)>(p, batch, first + i, at, part); });
        load_codes(p, batch, first + i, at, line);
        count_line(p.format, amax, unit, line, counted);
        part.used[i] = line.used, used[i] |= line.used != 0;
        if ((first + i) % kRangeEvery == 0) count_ranges(p.format, line, unit, counted);
      }
      if (!tensor) count_scales(p, batch, first, at, part, counted);
    }
    for (int i = 0; tensor && i < part.lines; ++i)
      if (used[i]) ++counted.scales[scale_bin(p.format, p.scale + batch * p.format.scale_bytes())];
  }

  static int run_of(const Format& f) { return f.scaling == Scaling::kTensor ? kRangeRun : f.block; }
  static int blocks_of(const Format& f, const Line& line) { return static_cast<int>(divide_up(line.length, run_of(f))); }
  static const uint8_t* codes_of(const SumsProblem& p, int64_t batch, int64_t line, int64_t at) {
    return p.data + (batch * p.lines() + line) * p.format.row_bytes(p.length()) + (p.format.packed() ? at / 2 : at);
  }

  template <class E>
  static void load_row(const SumsProblem& p, int64_t batch, int64_t row, int64_t at, Part& part) {
    const auto* x = static_cast<const typename E::Storage*>(p.x) + (batch * p.rows + row) * p.columns + at;
    int k = 0;
    for (; k + kLanes <= part.line.length; k += kLanes) store(&part.row[k], without_subnormals(E::load_lanes(x + k)));
    for (; k < Line::kLength; k += kLanes) {
      const int count = std::clamp(part.line.length - k, 0, kLanes);
      store(&part.row[k], count ? without_subnormals(load_elements(x, p.type, k, count)) : F32{});
    }
    part.line.x = part.row;
  }

  template <class E>
  static void load_columns(const SumsProblem& p, int64_t batch, int64_t line, int64_t at, Part& part) {
    const auto* x = static_cast<const typename E::Storage*>(p.x) + (batch * p.rows + at) * p.columns + line;
    for (int k = 0; k < Line::kLength; k += kLanes)
      for (int i = 0; i < part.lines; i += kLanes) {
        const int count = std::min(kLanes, part.lines - i);
        U32 square[kLanes];
        if (count == kLanes && k + kLanes <= part.line.length) {
          JLP_UNROLL(16)
          for (int r = 0; r < kLanes; ++r)
            square[r] = L::bits(without_subnormals(E::load_lanes(x + (k + r) * p.columns + i)));
        } else {
          for (int r = 0; r < kLanes; ++r)
            square[r] = k + r < part.line.length
                            ? L::bits(without_subnormals(load_elements(x, p.type, (k + r) * p.columns + i, count)))
                            : U32{};
        }
        transpose(square);
        for (int c = 0; c < count; ++c) store(&part.columns[i + c][k], square[c]);
      }
  }

  /// The bytes of a line's codes, and its scales, one for each 16.
  static void load_codes(const SumsProblem& p, int64_t batch, int64_t index, int64_t at, Line& line) {
    const Format& f = p.format;
    const int bytes = f.packed() ? (line.length + 1) / 2 : line.length;
    memcpy(line.bytes, codes_of(p, batch, index, at), bytes);
    memset(line.bytes + bytes, 0, sizeof line.bytes - bytes);
    const uint8_t* scale = scale_of(p, batch, index, at);
    const int blocks = static_cast<int>(divide_up(line.length, kBlock));
    const int shift = f.scaling == Scaling::kTensor ? 31 : __builtin_ctz(f.block / kBlock);  // a power of two
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

  /// The scale of a line's element, and so of the blocks behind it.
  static const uint8_t* scale_of(const SumsProblem& p, int64_t batch, int64_t line, int64_t at) {
    const Format& f = p.format;
    if (f.scaling == Scaling::kTensor) return p.scale + batch * f.scale_bytes();
    const int64_t row = f.tiles ? line / f.block : line;
    const int64_t columns = f.scale_columns(p.length());
    return p.scale + ((batch * f.scale_rows(p.lines()) + row) * columns + at / f.block) * f.scale_bytes();
  }

  static void count_ranges(const Format& f, const Line& line, float unit, Counted& counted) {
    const int run = run_of(f);
    const auto number = [&](uint32_t bits) { return Lanes<float>::from_bits(bits) * unit; };
    for (int b = 0; b < line.length / run; ++b) {
      uint32_t below, above, largest;
      find_middle(line.x + b * run, run, below, above, largest);
      const float median = number(below) / 2 + number(above) / 2;
      if (!(median > 0)) continue;
      counted.ranges += number(largest) / median, ++counted.runs;
    }
  }

  /// The magnitudes at places run / 2 - 1 and run / 2 in ascending order, the largest of those that so many are less than;
  /// and the largest of all.
  static void find_middle(const float* x, int run, uint32_t& below, uint32_t& above, uint32_t& largest) {
    alignas(64) uint32_t sizes[kRangeRun];
    for (int k = 0; k < run; k += kLanes) store(sizes + k, finite_magnitude(load<F32>(x + k)));
    const uint32_t middle = run / 2;
    U32 most_below = U32{}, most_above = U32{}, most = U32{};
    for (int k = 0; k < run; k += kLanes) {
      const U32 size = load<U32>(sizes + k);
      U32 less = U32{};
      for (int j = 0; j < run; ++j) less -= (U32)(size > sizes[j]);
      most_below = max_magnitude(most_below, less < middle ? size : U32{});
      most_above = max_magnitude(most_above, less <= middle ? size : U32{});
      most = max_magnitude(most, size);
    }
    below = max_lane(most_below), above = max_lane(most_above), largest = max_lane(most);
  }

  static int scale_bin(const Format& f, const uint8_t* scale) {
    if (f.scale_bytes() == 1) return *scale;
    uint32_t bits;
    memcpy(&bits, scale, sizeof bits);
    return bits >> 23 & 0xFF;
  }

  static void count_scales(const SumsProblem& p, int64_t batch, int64_t line, int64_t at, const Part& part,
                           Counted& counted) {
    const int together = p.format.tiles ? p.format.block : 1, bytes = static_cast<int>(p.format.scale_bytes());
    const int sixteens = p.format.block / kBlock, blocks = blocks_of(p.format, part.line);
    const uint32_t of_block = (1u << sixteens) - 1;
    for (int i = 0; i < part.lines; i += together) {
      const uint8_t* scale = scale_of(p, batch, line + i, at);
      uint32_t used = 0;
      for (int k = i; k < std::min(i + together, part.lines); ++k) used |= part.used[k];
      for (int b = 0; b < blocks; ++b, used >>= sixteens)
        if (used & of_block) ++counted.scales[scale_bin(p.format, scale + b * bytes)];
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
