// What quantisation did to an array: counts and sums of its elements beside what their codes decode to.
// Bytes moved per element: `moments` and `outliers` read the element; `sums` reads it and its code.
#pragma once

#include <algorithm>
#include <cmath>
#include <new>

#include "../quantize/dequantize.h"

namespace jaxlowprec {
namespace JLP_ISA {

typedef double Wide __attribute__((vector_size(2 * JLP_VECTOR_BYTES)));

template <class T, class V>
T sum_of_lanes(V v) {
  T sum{};
  for (int i = 0; i < kLanes; ++i) sum += static_cast<T>(v[i]);
  return sum;
}

/// Magnitude bits; 0 for subnormal numbers and for those that are not finite.
JLP_RULE U32 finite_magnitude(F32 v) {
  const U32 bits = magnitude(v);
  return bits >= kMinNormalBits && bits < kInfinityBits ? bits : U32{};
}

/// Subnormal numbers as zeros, in memory too.
JLP_RULE F32 without_subnormals(F32 v) { return L::from_bits(magnitude(v) < kMinNormalBits ? U32{} : L::bits(v)); }

struct Moments {
  static int64_t chunks_per_matrix(const MomentsProblem& p) { return p.parts(); }

  static void chunk(const MomentsProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * kMomentsElements, last = std::min(first + kMomentsElements, p.size);
    U32 most = U32{};
    Wide energy = Wide{};
    for (int64_t i = first; i < last; i += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, last - i));
      const U32 bits = finite_magnitude(load_elements(p.x, p.type, batch * p.size + i, count));
      const Wide wide = __builtin_convertvector(L::from_bits(bits), Wide);
      most = max_magnitude(most, bits), energy += wide * wide;
    }
    float* result = p.result + 2 * (batch * chunks_per_matrix(p) + chunk);
    const uint32_t largest = max_lane(most);
    memcpy(result, &largest, sizeof largest);
    result[1] = static_cast<float>(std::sqrt(sum_of_lanes<double>(energy) / (last - first)));
  }
};

struct Outliers {
  static int64_t chunks_per_matrix(const OutliersProblem& p) { return p.parts(); }

  static void chunk(const OutliersProblem& p, int64_t batch, int64_t chunk) {
    int32_t* counts = p.result + (batch * chunks_per_matrix(p) + chunk) * p.columns;
    std::fill_n(counts, p.columns, 0);
    const uint32_t threshold = Lanes<float>::bits(p.threshold[batch]);
    const int64_t first = chunk * p.rows_each();
    for (int64_t row = first; row < std::min(first + p.rows_each(), p.rows); ++row)
      for (int64_t column = 0; column < p.columns; column += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, p.columns - column));
        const F32 v = load_elements(p.x, p.type, (batch * p.rows + row) * p.columns + column, count);
        const U32 beyond = finite_magnitude(v) > threshold ? fill<F32>(1u) : U32{};
        if (count == kLanes)
          store(counts + column, load<U32>(counts + column) + beyond);
        else
          for (int i = 0; i < count; ++i) counts[column + i] += static_cast<int32_t>(beyond[i]);
      }
  }
};

/// A part of an array's lines, which its blocks lie along; and one line with what its codes decode to, all in the cache. In
/// scratch memory.
struct Lines {
  static constexpr int kLength = 256, kStride = kLength + 16;  // columns do not begin in the same cache sets
  int lines, length;                                           // that exist
  alignas(64) float columns[kSumsLines][kStride];              // of a columnwise problem, transposed
  alignas(64) float row[kLength];                              // of a rowwise one
  const float* x;                                              // the line
  alignas(64) float decoded[kLength];
  alignas(64) uint8_t codes[kLength];           // its bytes, zeros behind them
  alignas(64) uint8_t sizes[kLength];           // its magnitude codes, one a byte
  uint32_t amax[kSumsLines][kLength / kBlock];  // of all lines' blocks: finite magnitudes
};

/// The counts and sums of a part.
struct Counted {
  uint64_t elements = 0, zeros = 0, underflow = 0, saturation = 0, nonfinite = 0, poisoned = 0, runs = 0;
  double error = 0, magnitude = 0, square_error = 0, energy = 0, ranges = 0;
  uint32_t scales[kSumsScales] = {};
  uint32_t bytes[4][256] = {};  // of codes, by turns: neighbours are often alike
  uint64_t padded_codes = 0;    // zeros among them

  void store(const Format& format, float* result) const {
    std::fill_n(result, kSums, 0.0f);
    const double numbers[] = {double(elements), double(zeros), double(underflow), double(saturation), double(nonfinite),
                              double(poisoned), error,         magnitude,         square_error,       energy,
                              ranges,           double(runs)};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) result[i] = static_cast<float>(numbers[i]);
    for (int i = 0; i < kSumsScales; ++i) result[kSumsScalesFrom + i] = static_cast<float>(scales[i]);
    uint64_t codes[kSumsCodes] = {};
    for (int byte = 0; byte < 256; ++byte) {
      const uint64_t count = uint64_t{bytes[0][byte]} + bytes[1][byte] + bytes[2][byte] + bytes[3][byte];
      if (format.packed()) {
        codes[byte & 15] += count, codes[byte >> 4] += count;
      } else {
        with_float8(format.code, [&](auto element) { codes[(byte & 0x7F) >> decltype(element)::kMantissaBits] += count; });
      }
    }
    codes[0] -= padded_codes;
    for (int i = 0; i < kSumsCodes; ++i) result[kSumsCodesFrom + i] = static_cast<float>(codes[i]);
  }
};

struct Sums {
  static int64_t chunks_per_matrix(const SumsProblem& p) { return p.parts(); }

  static void chunk(const SumsProblem& p, int64_t batch, int64_t chunk) {
    Lines& part = *new (thread_scratch(sizeof(Lines))) Lines;  // decoding needs no scratch memory
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
  static void count_lines(const SumsProblem& p, int64_t batch, int64_t line, Lines& part, Counted& counted) {
    const bool tensor = p.format.scaling == Scaling::kTensor;
    const uint32_t largest = largest_code(p.format.code);
    bool used[kSumsLines] = {};
    for (int64_t at = 0; at < p.length(); at += Lines::kLength) {
      part.length = static_cast<int>(std::min<int64_t>(Lines::kLength, p.length() - at));
      if (p.columnwise) load_columns(p, batch, line, at, part);
      for (int i = 0; i < part.lines; ++i) {
        part.x = part.columns[i];
        if (!p.columnwise) load_row(p, (batch * p.rows + line + i) * p.columns + at, part);
        decode(p, batch, line + i, at, part);
        count_codes(p.format.packed(), part, counted);
        count_elements(part, largest, p.unit[batch], counted);
        find_maxima(p.format, part, i);
        for (int b = 0; tensor && b < blocks_of(p.format, part); ++b) used[i] |= part.amax[i][b] != 0;
        if ((line + i) % kRangeEvery == 0) count_ranges(p.format, part, part.amax[i], p.unit[batch], counted);
      }
      if (!tensor) count_scales(p, batch, line, at, part, counted);
    }
    for (int i = 0; tensor && i < part.lines; ++i)
      if (used[i]) ++counted.scales[scale_bin(p.format, p.scale + batch * p.format.scale_bytes())];
  }

  static int run_of(const Format& f) { return f.scaling == Scaling::kTensor ? kRangeRun : f.block; }
  static int blocks_of(const Format& f, const Lines& part) { return static_cast<int>(divide_up(part.length, run_of(f))); }
  static const uint8_t* codes_of(const SumsProblem& p, int64_t batch, int64_t line, int64_t at) {
    return p.data + (batch * p.lines() + line) * p.format.row_bytes(p.length()) + (p.format.packed() ? at / 2 : at);
  }

  static void load_row(const SumsProblem& p, int64_t index, Lines& part) {
    for (int k = 0; k < Lines::kLength; k += kLanes) {
      const int count = std::clamp(part.length - k, 0, kLanes);
      store(&part.row[k], count ? without_subnormals(load_elements(p.x, p.type, index + k, count)) : F32{});
    }
    part.x = part.row;
  }

  static void load_columns(const SumsProblem& p, int64_t batch, int64_t line, int64_t at, Lines& part) {
    for (int k = 0; k < Lines::kLength; k += kLanes)
      for (int i = 0; i < part.lines; i += kLanes) {
        const int count = std::min(kLanes, part.lines - i);
        U32 square[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          const int64_t index = (batch * p.rows + at + k + r) * p.columns + line + i;
          square[r] = k + r < part.length ? L::bits(without_subnormals(load_elements(p.x, p.type, index, count))) : U32{};
        }
        transpose(square);
        for (int c = 0; c < count; ++c) store(&part.columns[i + c][k], square[c]);
      }
  }

  static void decode(const SumsProblem& p, int64_t batch, int64_t line, int64_t at, Lines& part) {
    const Format& f = p.format;
    const int bytes = f.packed() ? (part.length + 1) / 2 : part.length;
    memset(part.codes, 0, sizeof part.codes);
    memcpy(part.codes, codes_of(p, batch, line, at), bytes);
    if (f.packed())
      for (int b = 0; b < Lines::kLength / 2; ++b)
        part.sizes[2 * b] = part.codes[b] & 7, part.sizes[2 * b + 1] = part.codes[b] >> 4 & 7;
    else
      for (int b = 0; b < Lines::kLength; ++b) part.sizes[b] = part.codes[b] & 0x7F;
    DequantizeProblem one{};
    one.format = f, one.data = part.codes, one.scale = scale_of(p, batch, line, at);
    one.amax = p.amax ? p.amax + batch : nullptr;
    one.batch = one.rows = 1, one.columns = part.length, one.type = ElementType::kF32;
    one.result = part.decoded;
    std::fill(part.decoded + part.length / kLanes * kLanes, part.decoded + Lines::kLength, 0.0f);
    Dequantize::chunk(one, 0, 0);
  }
  static uint32_t largest_code(CodeType code) {
    return with_float(code, [](auto element) { return static_cast<uint32_t>(decltype(element)::kLargestCode); });
  }
  /// The scale of a line's element, and so of the blocks behind it.
  static const uint8_t* scale_of(const SumsProblem& p, int64_t batch, int64_t line, int64_t at) {
    const Format& f = p.format;
    if (f.scaling == Scaling::kTensor) return p.scale + batch * f.scale_bytes();
    const int64_t row = f.tiles ? line / f.block : line;
    const int64_t columns = f.scale_columns(p.length());
    return p.scale + ((batch * f.scale_rows(p.lines()) + row) * columns + at / f.block) * f.scale_bytes();
  }

  static void count_codes(bool packed, const Lines& part, Counted& counted) {
    const int bytes = packed ? (part.length + 1) / 2 : part.length;
    int i = 0;
    for (; i + 4 <= bytes; i += 4)
      for (int turn = 0; turn < 4; ++turn) ++counted.bytes[turn][part.codes[i + turn]];
    for (; i < bytes; ++i) ++counted.bytes[0][part.codes[i]];
    counted.padded_codes += packed ? part.length % 2 : 0;
  }

  static void count_elements(const Lines& part, uint32_t largest, float unit, Counted& counted) {
    U32 most = U32{};
    for (int k = 0; k < part.length; k += kLanes)
      most = max_magnitude(most, max_magnitude(magnitude(load<F32>(part.x + k)), magnitude(load<F32>(part.decoded + k))));
    max_lane(most) < kInfinityBits ? count_elements_as<true>(part, largest, unit, counted)
                                   : count_elements_as<false>(part, largest, unit, counted);
  }

  template <bool kFinite>
  static void count_elements_as(const Lines& part, uint32_t largest, float unit, Counted& counted) {
    U32 zeros = U32{}, underflow = U32{}, saturation = U32{}, nonfinite = U32{}, poisoned = U32{};
    F32 error = F32{}, magnitudes = F32{}, square_error = F32{}, energy = F32{};
    const U32 one = fill<F32>(1u), all = ~U32{};
    for (int k = 0; k < part.length; k += kLanes) {
      const F32 v = load<F32>(part.x + k), d = load<F32>(part.decoded + k);
      const U32 size = magnitude(v), decoded = magnitude(d);
      F32 kept = v * unit, off = d * unit - kept;
      U32 cut_off = load_u8(part.sizes + k) == largest && size > decoded && decoded != 0 ? one : U32{};
      if (!kFinite) {
        const U32 finite = size < kInfinityBits ? all : U32{}, decodes = decoded < kInfinityBits ? all : U32{};
        nonfinite += ~finite & one;
        poisoned += finite & ~decodes & one;
        kept = L::from_bits(L::bits(kept) & finite & decodes), off = L::from_bits(L::bits(off) & finite & decodes);
        cut_off &= finite & decodes;
      }
      zeros += size == 0 ? one : U32{};
      underflow += size != 0 && decoded == 0 ? one : U32{};
      saturation += cut_off;
      error += off, magnitudes += absolute(kept), square_error += off * off, energy += kept * kept;
    }
    const int padded = (kLanes - part.length % kLanes) % kLanes;
    counted.elements += part.length;
    counted.zeros += sum_of_lanes<uint64_t>(zeros) - padded;
    counted.underflow += sum_of_lanes<uint64_t>(underflow);
    counted.saturation += sum_of_lanes<uint64_t>(saturation);
    counted.nonfinite += sum_of_lanes<uint64_t>(nonfinite);
    counted.poisoned += sum_of_lanes<uint64_t>(poisoned);
    counted.error += sum_of_lanes<double>(error);
    counted.magnitude += sum_of_lanes<double>(magnitudes);
    counted.square_error += sum_of_lanes<double>(square_error);
    counted.energy += sum_of_lanes<double>(energy);
  }

  static void find_maxima(const Format& f, Lines& part, int i) {
    const int run = run_of(f);
    for (int b = 0; b < blocks_of(f, part); ++b) {
      U32 most = U32{};
      for (int k = b * run; k < (b + 1) * run; k += kLanes)
        most = max_magnitude(most, finite_magnitude(load<F32>(part.x + k)));
      part.amax[i][b] = max_lane(most);
    }
  }

  static void count_ranges(const Format& f, const Lines& part, const uint32_t* amax, float unit, Counted& counted) {
    const int run = run_of(f);
    const auto number = [&](uint32_t bits) { return Lanes<float>::from_bits(bits) * unit; };
    for (int b = 0; b < part.length / run; ++b) {
      uint32_t below, above;
      find_middle(part.x + b * run, run, below, above);
      const float median = number(below) / 2 + number(above) / 2;
      if (!(median > 0)) continue;
      counted.ranges += number(amax[b]) / median, ++counted.runs;
    }
  }

  /// The magnitudes at places run / 2 - 1 and run / 2 in ascending order: the largest of those that so many are less than.
  static void find_middle(const float* x, int run, uint32_t& below, uint32_t& above) {
    alignas(64) uint32_t sizes[kRangeRun];
    for (int k = 0; k < run; k += kLanes) store(sizes + k, finite_magnitude(load<F32>(x + k)));
    const uint32_t middle = run / 2;
    U32 most_below = U32{}, most_above = U32{};
    for (int k = 0; k < run; k += kLanes) {
      const U32 size = load<U32>(sizes + k);
      U32 less = U32{};
      for (int j = 0; j < run; ++j) less -= (U32)(size > sizes[j]);
      most_below = max_magnitude(most_below, less < middle ? size : U32{});
      most_above = max_magnitude(most_above, less <= middle ? size : U32{});
    }
    below = max_lane(most_below), above = max_lane(most_above);
  }

  static int scale_bin(const Format& f, const uint8_t* scale) {
    if (f.scale_bytes() == 1) return *scale;
    uint32_t bits;
    memcpy(&bits, scale, sizeof bits);
    return bits >> 23 & 0xFF;
  }

  static void count_scales(const SumsProblem& p, int64_t batch, int64_t line, int64_t at, const Lines& part,
                           Counted& counted) {
    const int together = p.format.tiles ? p.format.block : 1;
    for (int i = 0; i < part.lines; i += together) {
      const uint8_t* scale = scale_of(p, batch, line + i, at);
      for (int b = 0; b < blocks_of(p.format, part); ++b) {
        uint32_t most = 0;
        for (int k = i; k < std::min(i + together, part.lines); ++k) most = std::max(most, part.amax[k][b]);
        if (most) ++counted.scales[scale_bin(p.format, scale + b * p.format.scale_bytes())];
      }
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
