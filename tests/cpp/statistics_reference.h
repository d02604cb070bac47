// The oracle of the statistics' tests of the CPU and of the GPU: one element after another, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "quantize_cases.h"

namespace jaxlowprec {

inline std::vector<Shape> shapes() {
  return {{1, 1}, {5, 7}, {1, 16}, {17, 33}, {3, 300}, {130, 20}, {64, 257}, {257, 128}};
}

inline std::vector<NamedFormat> formats() {
  std::vector<NamedFormat> all(std::begin(kNvfp4), std::end(kNvfp4));
  all.insert(all.end(), std::begin(kOtherFormats), std::end(kOtherFormats));
  return all;
}

/// Those of which sums are taken: squares of all others do not fit float32 with the unit of these tests.
constexpr Data kSummable[] = {Data::kNormal, Data::kSparse, Data::kZero, Data::kNaN, Data::kInfinity};
constexpr Data kAnyData[] = {Data::kNormal, Data::kSparse, Data::kZero, Data::kNaN, Data::kInfinity, Data::kWide};

inline std::string name(Data data) { return "data " + std::to_string(static_cast<int>(data)); }

inline float finite_magnitude(float x) { return std::isfinite(x) ? std::fabs(x) : 0.0f; }

inline bool is_near(double found, double expected, double tolerance) {
  return std::fabs(found - expected) <= tolerance * (1 + std::fabs(expected));
}

// --- moments and outliers

/// What is known of a matrix without its quantised form.
struct ExpectedMoments {
  float largest = 0;
  double energy = 0;
  std::vector<int> beyond;  // of each column

  ExpectedMoments(const void* x, ElementType type, Shape shape, int64_t batch, float threshold) : beyond(shape.columns) {
    const int64_t size = shape.rows * shape.columns;
    for (int64_t i = 0; i < size; ++i) {
      const float v = finite_magnitude(reference::get(x, type, batch * size + i));
      largest = std::max(largest, v), energy += double(v) * v;
      beyond[i % shape.columns] += v > threshold;
    }
  }
};

// --- sums

/// The sums of one matrix, element after element.
inline std::vector<double> expected_sums(const SumsProblem& p, const std::vector<float>& decoded, int64_t batch) {
  const Format& f = p.format;
  std::vector<double> sums(kSums);
  const int64_t lines = p.lines(), length = p.length(), run = f.scaling == Scaling::kTensor ? kRangeRun : f.block;
  const auto x = [&](int64_t line, int64_t k) {
    const int64_t at = p.columnwise ? k * p.columns + line : line * p.columns + k;
    return reference::get(p.x, p.type, batch * p.rows * p.columns + at);
  };
  std::vector<bool> used(f.scales(lines, length));
  for (int64_t line = 0; line < lines; ++line) {
    bool line_used = false;
    const uint8_t* codes = p.data + (batch * lines + line) * f.row_bytes(length);
    for (int64_t k = 0; k < length; ++k) {
      const float v = x(line, k), d = decoded[(batch * lines + line) * length + k];
      const bool known = std::isfinite(v) && std::isfinite(d);
      const int code = f.packed() ? reference::code_at(codes, k) : codes[k];
      const int largest = with_float(f.code, [](auto type) { return decltype(type)::kLargestCode; });
      const int magnitude = code & (f.packed() ? 7 : 0x7F);
      const bool cut_off = magnitude == largest && d != 0 && std::fabs(v) > std::fabs(d);
      const double off = double(d) - v;
      const auto count = [](bool is) { return is ? 1.0 : 0.0; };
      const double numbers[] = {1.0,
                                count(v == 0),
                                count(v != 0 && d == 0),
                                count(known && cut_off),
                                count(!std::isfinite(v)),
                                count(std::isfinite(v) && !std::isfinite(d)),
                                known ? off : 0.0,
                                known ? std::fabs(v) : 0.0,
                                known ? off * off : 0.0,
                                known ? double(v) * v : 0.0};
      for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) sums[i] += numbers[i];
      const int mantissa = f.packed() ? 0 : with_float8(f.code, [](auto type) { return decltype(type)::kMantissaBits; });
      sums[kSumsCodesFrom + (f.packed() ? code : magnitude >> mantissa)] += 1;
      if (finite_magnitude(v) == 0) continue;
      line_used = true;
      if (f.scaling != Scaling::kTensor)
        used[(f.tiles ? line / f.block : line) * f.scale_columns(length) + k / f.block] = true;
    }
    if (f.scaling == Scaling::kTensor) used[0] = line_used;
    for (size_t i = 0; i < used.size() && f.scaling == Scaling::kTensor && line_used; ++i) {
      uint32_t bits;
      memcpy(&bits, p.scale + 4 * batch, 4);
      sums[kSumsScalesFrom + (bits >> 23 & 0xFF)] += 1;
    }
    for (int64_t first = 0; line % kRangeEvery == 0 && first + run <= length; first += run) {
      std::vector<float> sizes(run);
      for (int64_t i = 0; i < run; ++i) sizes[i] = finite_magnitude(x(line, first + i));
      std::sort(sizes.begin(), sizes.end());
      const float median = reference::multiply(sizes[run / 2 - 1], 0.5f) + reference::multiply(sizes[run / 2], 0.5f);
      if (median > 0) sums[10] += sizes.back() / median, sums[11] += 1;
    }
  }
  for (size_t i = 0; i < used.size() && f.scaling != Scaling::kTensor; ++i) {
    if (!used[i]) continue;
    const uint8_t* scale = p.scale + (batch * used.size() + i) * f.scale_bytes();
    uint32_t bits = *scale;
    if (f.scale_bytes() == 4) memcpy(&bits, scale, 4), bits = bits >> 23 & 0xFF;
    sums[kSumsScalesFrom + bits] += 1;
  }
  return sums;
}

/// Two matrices, any codes and scales of theirs, and the sums of either.
struct SumsCase {
  static constexpr int64_t kBatch = 2;
  Buffer x, data, scale;
  const float amax[kBatch] = {3.0f, 0.7f}, unit[kBatch] = {1.0f, 1.0f};
  SumsProblem p;  // without a result
  std::vector<double> expected;

  SumsCase(Shape shape, ElementType type, const Format& f, bool columnwise, Data kind, std::mt19937& random)
      : x(kBatch * shape.rows * shape.columns * reference::element_size(type), random() % 2 * 4),
        data(kBatch * lines(shape, columnwise) * f.row_bytes(length(shape, columnwise))),
        scale(kBatch * f.scales(lines(shape, columnwise), length(shape, columnwise)) * f.scale_bytes()),
        p{x.as(), type, kBatch, shape.rows, shape.columns, columnwise, f, data.as(), scale.as(), nullptr, unit, nullptr} {
    const int64_t size = shape.rows * shape.columns;
    fill_elements(x.as(), type, 0, size, kind, random);
    fill_elements(x.as(), type, size, size, Data::kNormal, random);
    for (int64_t i = 0; i < data.size(); ++i) data.as()[i] = static_cast<uint8_t>(random());
    for (int64_t i = 0; i < scale.size(); ++i)
      scale.as()[i] = f.scale_bytes() == 4 ? (i % 4 == 3 ? 0x3F : 0x10) : random() % 128;
    const int64_t poisoned = static_cast<int64_t>(random() % (scale.size() / f.scale_bytes())) * f.scale_bytes();
    if (kind == Data::kNaN && f.scale_bytes() == 1) scale.as()[poisoned] = f.scaling == Scaling::kTwoLevel ? 0x7F : 0xFF;
    if (kind == Data::kNaN && f.scale_bytes() == 4) memcpy(&scale.as()[poisoned], &kNaNBits, 4);
    // Codes behind a line's end are zeros.
    for (int64_t line = 0; f.packed() && line < kBatch * p.lines(); ++line)
      for (int64_t k = p.length(); k < 2 * f.row_bytes(p.length()); ++k)
        data.as()[line * f.row_bytes(p.length()) + k / 2] &= k % 2 ? 0x0F : 0xF0;
    if (f.scaling == Scaling::kTwoLevel) p.amax = amax;
    std::vector<float> decoded(kBatch * size);
    DequantizeProblem d{f, p.data, p.scale, p.amax, kBatch, p.lines(), p.length(), false, 0, nullptr, ElementType::kF32};
    reference::dequantize(d, decoded.data());
    for (int64_t b = 0; b < kBatch; ++b)
      for (const double sum : expected_sums(p, decoded, b)) expected.push_back(sum);
  }

  /// Counts agree exactly, sums to rounding.
  void check(const std::vector<double>& found) const {
    for (size_t i = 0; i < expected.size(); ++i) {
      const size_t which = i % kSums;
      const check::Given given("sum " + std::to_string(which));
      const bool is_count = which < 6 || which > 10;
      if (is_count)
        CHECK_EQ(found[i], expected[i]);
      else
        CHECK(is_near(found[i], expected[i], 1e-3) || expected[i] > 1e37);  // more than a float holds
    }
  }

 private:
  static int64_t lines(Shape shape, bool columnwise) { return columnwise ? shape.columns : shape.rows; }
  static int64_t length(Shape shape, bool columnwise) { return columnwise ? shape.rows : shape.columns; }
};

}  // namespace jaxlowprec
