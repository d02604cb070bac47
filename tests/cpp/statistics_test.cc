// What quantisation did to an array, counted by the kernels of every instruction set and, one element after another, here.
#include <cmath>
#include <vector>

#include "kernel_runs.h"
#include "quantize_cases.h"

namespace jaxlowprec {
namespace {

std::vector<Shape> shapes() { return {{1, 1}, {5, 7}, {1, 16}, {17, 33}, {3, 300}, {130, 20}, {64, 257}, {257, 128}}; }

std::vector<NamedFormat> formats() {
  std::vector<NamedFormat> all(std::begin(kNvfp4), std::end(kNvfp4));
  all.insert(all.end(), std::begin(kOtherFormats), std::end(kOtherFormats));
  return all;
}

float finite_magnitude(float x) { return std::isfinite(x) ? std::fabs(x) : 0.0f; }

bool is_near(double found, double expected, double tolerance) {
  return std::fabs(found - expected) <= tolerance * (1 + std::fabs(expected));
}

template <class Problem>
std::vector<double> added_up(const Problem& p, const Buffer& found, int64_t each) {
  std::vector<double> total(p.batch * each);
  for (int64_t i = 0; i < p.batch * p.parts() * each; ++i)
    total[i / (p.parts() * each) * each + i % each] += found.as<float>()[i];
  return total;
}

// --- moments and outliers

TEST(moments_and_outliers_are_those_of_the_finite_elements) {
  std::mt19937 random(1);
  for (const Shape shape : shapes())
    for (const ElementType type : kTypes)
      for (const Data data : {Data::kNormal, Data::kSparse, Data::kZero, Data::kNaN, Data::kInfinity}) {
        const check::Given given(name(shape) + " " + name(type) + " data " + std::to_string(static_cast<int>(data)));
        const int64_t size = shape.rows * shape.columns;
        const Buffer x(2 * size * reference::element_size(type), random() % 2 * 4);
        fill_elements(x.as(), type, 0, size, data, random);
        fill_elements(x.as(), type, size, size, Data::kNormal, random);
        MomentsProblem moments{x.as(), type, 2, size, nullptr};
        const float threshold[] = {1.5f, 0.5f};
        OutliersProblem outliers{x.as(), type, 2, shape.rows, shape.columns, threshold, nullptr};
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Buffer found(2 * moments.parts() * 8), counts(2 * outliers.parts() * shape.columns * 4);
          moments.result = found.as<float>(), outliers.result = counts.as<int32_t>();
          run_chunks(k, moments, scrambled), run_chunks(k, outliers, scrambled);
          for (int64_t b = 0; b < 2; ++b) {
            float largest = 0;
            double energy = 0, found_energy = 0, found_largest = 0;
            std::vector<int> beyond(shape.columns), found_beyond(shape.columns);
            for (int64_t i = 0; i < size; ++i) {
              const float v = finite_magnitude(reference::get(x.as(), type, b * size + i));
              largest = std::max(largest, v), energy += double(v) * v;
              beyond[i % shape.columns] += v > threshold[b];
            }
            for (int64_t part = 0; part < moments.parts(); ++part) {
              const float* of_part = moments.result + 2 * (b * moments.parts() + part);
              found_largest = std::max<double>(found_largest, of_part[0]),
              found_energy += double(of_part[1]) * of_part[1] * moments.size_of(part);
            }
            for (int64_t i = 0; i < outliers.parts() * shape.columns; ++i)
              found_beyond[i % shape.columns] += outliers.result[b * outliers.parts() * shape.columns + i];
            CHECK_EQ(found_largest, largest);
            CHECK(is_near(found_energy, energy, 1e-5));
            CHECK(found_beyond == beyond);
          }
        });
      }
}

// --- sums

/// The sums of one matrix, element after element.
std::vector<double> expected_sums(const SumsProblem& p, const std::vector<float>& decoded, int64_t batch) {
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

void check_sums(Shape shape, ElementType type, const NamedFormat& format, bool columnwise, Data kind, std::mt19937& random) {
  const int64_t size = shape.rows * shape.columns;
  const Buffer x(2 * size * reference::element_size(type), random() % 2 * 4);
  fill_elements(x.as(), type, 0, size, kind, random);
  fill_elements(x.as(), type, size, size, Data::kNormal, random);
  const float amax[] = {3.0f, 0.7f}, unit[] = {1.0f, 1.0f};
  SumsProblem p{x.as(),        type,    2,       shape.rows, shape.columns, columnwise,
                format.format, nullptr, nullptr, nullptr,    unit,          nullptr};
  const Format& f = p.format;
  const Buffer data(2 * p.lines() * f.row_bytes(p.length())), scale(2 * f.scales(p.lines(), p.length()) * f.scale_bytes());
  for (int64_t i = 0; i < data.size(); ++i) data.as()[i] = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < scale.size(); ++i)
    scale.as()[i] = f.scale_bytes() == 4 ? (i % 4 == 3 ? 0x3F : 0x10) : random() % 128;
  // Codes behind a line's end are zeros.
  for (int64_t line = 0; f.packed() && line < 2 * p.lines(); ++line)
    for (int64_t k = p.length(); k < 2 * f.row_bytes(p.length()); ++k)
      data.as()[line * f.row_bytes(p.length()) + k / 2] &= k % 2 ? 0x0F : 0xF0;
  p.data = data.as(), p.scale = scale.as(), p.amax = f.scaling == Scaling::kTwoLevel ? amax : nullptr;
  std::vector<float> decoded(2 * size);
  DequantizeProblem d{f, p.data, p.scale, p.amax, 2, p.lines(), p.length(), false, 0, nullptr, ElementType::kF32};
  reference::dequantize(d, decoded.data());
  std::vector<double> expected;
  for (int64_t b = 0; b < 2; ++b)
    for (const double sum : expected_sums(p, decoded, b)) expected.push_back(sum);
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer found(2 * p.parts() * kSums * 4);
    p.result = found.as<float>();
    run_chunks(k, p, scrambled);
    const std::vector<double> total = added_up(p, found, kSums);
    for (size_t i = 0; i < total.size(); ++i) {
      const size_t which = i % kSums;
      const check::Given given("sum " + std::to_string(which));
      const bool is_count = which < 6 || which > 10;
      if (is_count)
        CHECK_EQ(total[i], expected[i]);
      else
        CHECK(is_near(total[i], expected[i], 1e-3) || expected[i] > 1e37);  // more than a float holds
    }
  });
}

TEST(sums_are_those_of_the_elements) {
  std::mt19937 random(2);
  for (const Shape shape : shapes())
    for (const NamedFormat& format : formats())
      for (const bool columnwise : {false, true}) {
        const ElementType type = kTypes[random() % 3];
        const Data kind =
            std::vector<Data>{Data::kNormal, Data::kSparse, Data::kZero, Data::kNaN, Data::kInfinity}[random() % 5];
        const check::Given given(name(shape) + " " + name(type) + " " + format.name + (columnwise ? " columnwise" : "") +
                                 " data " + std::to_string(static_cast<int>(kind)));
        check_sums(shape, type, format, columnwise, kind, random);
      }
}

}  // namespace
}  // namespace jaxlowprec
