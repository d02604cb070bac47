// Float8Rows and Int8Rows of every instruction set (numerics.md 18): codes are those of true divisions, one after another.
#include "../../xla_ffi/numerics/float8.h"
#include "../../xla_ffi/numerics/row_scales.h"
#include "kernel_runs.h"
#include "quantize_cases.h"

namespace jaxlowprec {
namespace {

Format rows_format(CodeType code, ElementType scale_type) {
  return {code, Scaling::kRows, 1, false, code == CodeType::kInt8 ? ScaleRule::kDeploy : ScaleRule::kUp, false,
          0,    scale_type};
}

template <class Element>
uint8_t float8_code(float x, float scale) {
  const uint32_t magnitude = float8_encode_magnitude<Element>(std::abs(x) / scale);
  return static_cast<uint8_t>(x == 0 ? 0u : magnitude | (std::signbit(x) ? 0x80u : 0u));
}

/// Codes of one line, and its scale.
void quantize_line(const std::vector<float>& x, const Format& f, uint8_t* codes, float& scale) {
  const bool integers = f.code == CodeType::kInt8, single = f.scale_type == ElementType::kF32;
  const float maximum = integers ? 127.0f : f.code == CodeType::kE4M3 ? 448.0f : 57344.0f;
  float amax = 0;
  for (const float v : x) amax = std::isnan(v) || std::isnan(amax) ? NAN : std::max(amax, std::abs(v));
  const float of_zeros = f.scale_type == ElementType::kBF16  ? 0.0078125f
                         : f.scale_type == ElementType::kF16 ? 0.0009765625f
                                                             : (integers ? 0.0f : 1.0f);
  const LineScaleRule rule{maximum, f.least_scale, of_zeros, !(integers && single)};
  const LineFactors<float> factors = line_factors<float>(Lanes<float>::bits(amax), rule, [&](float s) {
    return single ? s : reference::number(reference::rounded_bits(s, f.scale_type), f.scale_type);
  });
  scale = factors.scale;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(scale))
      codes[i] = 0;
    else if (!integers)
      codes[i] = f.code == CodeType::kE4M3 ? float8_code<E4M3>(x[i], scale) : float8_code<E5M2>(x[i], scale);
    else
      codes[i] = static_cast<uint8_t>(static_cast<int>(
          std::nearbyint(std::clamp(rule.divides ? x[i] / scale : x[i] * factors.encode, -127.0f, 127.0f))));
  }
}

/// Rowwise, and both ways, against the lines one by one.
void check_lines(const Buffer& x, ElementType type, Shape shape, const Format& format) {
  const int64_t rows = shape.rows, columns = shape.columns, scale_bytes = reference::element_size(format.scale_type);
  Buffer data(rows * columns), transposed(rows * columns), scale(rows * scale_bytes), column_scale(columns * scale_bytes);
  const auto lines = [&](bool down, uint8_t* codes, void* scales) {
    const int64_t count = down ? columns : rows, length = down ? rows : columns;
    for (int64_t line = 0; line < count; ++line) {
      std::vector<float> values(length);
      for (int64_t i = 0; i < length; ++i)
        values[i] = reference::get(x.as(), type, down ? i * columns + line : line * columns + i);
      float found;
      quantize_line(values, format, codes + line * length, found);
      reference::put(scales, format.scale_type, line, found);
    }
  };
  lines(false, data.as(), scale.as()), lines(true, transposed.as(), column_scale.as());
  for_all_runs([&](const Kernels& k, bool scrambled) {
    Buffer found(data.size()), found_down(data.size()), scales(scale.size()), scales_down(column_scale.size());
    QuantizeProblem p{x.as(), type, 1, rows, columns, format, false, {}, {}, false, 0};
    p.rowwise.data = found.as(), p.rowwise.scale = scales.as();
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(found, data), -1);
    CHECK_EQ(first_difference(scales, scale, format.scale_type), -1);
    memset(found.as(), 0xA5, found.size());
    std::vector<float> of_rows(rows), of_columns(columns);
    const LineAmaxesProblem amaxes{x.as(),
                                   type,
                                   1,
                                   rows,
                                   columns,
                                   reinterpret_cast<uint32_t*>(of_rows.data()),
                                   reinterpret_cast<uint32_t*>(of_columns.data())};
    run_chunks(k, amaxes, scrambled);
    p.rowwise.tensor = of_rows.data(), p.columnwise.tensor = of_columns.data();
    p.columnwise.data = found_down.as(), p.columnwise.scale = scales_down.as();
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(found, data), -1);
    CHECK_EQ(first_difference(found_down, transposed), -1);
    CHECK_EQ(first_difference(scales_down, column_scale, format.scale_type), -1);
  });
}

std::vector<Format> formats() {
  std::vector<Format> all;
  for (const CodeType code : {CodeType::kE4M3, CodeType::kE5M2, CodeType::kInt8})
    for (const ElementType type : kTypes) all.push_back(rows_format(code, type));
  return all;
}

TEST(codes_of_lines_are_those_of_true_divisions) {
  std::mt19937 random(1);
  for (const Shape shape : {Shape{1, 1}, {17, 33}, {5, 256}, {130, 600}, {9, 1100}})
    for (const ElementType type : kTypes)
      for (const Data data :
           {Data::kNormal, Data::kSparse, Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity, Data::kAnyBits}) {
        if (kReduced && random() % 4) continue;
        const Buffer x(shape.rows * shape.columns * reference::element_size(type), random() % 2 * 4);
        fill_elements(x.as(), type, 0, shape.rows * shape.columns, data, random);
        const Format format = formats()[random() % formats().size()];
        const check::Given given(name(shape) + " " + name(type) + " data " + std::to_string(static_cast<int>(data)) +
                                 " code " + std::to_string(static_cast<int>(format.code)));
        check_lines(x, type, shape, format);
      }
}

TEST(codes_of_every_mantissa_by_every_largest_one) {
  constexpr int kBinades = 25;
  const Shape shape{128, kBinades * 128 + 70};  // the last 70: zeros
  for (const Format& format :
       {rows_format(CodeType::kE4M3, ElementType::kF32), rows_format(CodeType::kE5M2, ElementType::kF32),
        rows_format(CodeType::kE4M3, ElementType::kBF16), rows_format(CodeType::kInt8, ElementType::kF32)})
    for (const int shift : {-126, -100, -80, 0, 100}) {
      if (kReduced && shift != 0) continue;
      const check::Given given("code " + std::to_string(static_cast<int>(format.code)) + " 2^" + std::to_string(shift));
      const Buffer x(shape.rows * shape.columns * 2);
      for (int64_t r = 0; r < shape.rows; ++r)
        for (int64_t i = 0; i < shape.columns; ++i) {
          const int64_t binade = i / 128;
          const float value =
              binade < kBinades ? std::ldexp(1 + static_cast<float>(i % 128) / 128, -static_cast<int>(binade)) : 0;
          const float kept = std::ldexp(std::min(value, 1 + static_cast<float>(r) / 128), shift);
          reference::put(x.as(), ElementType::kBF16, r * shape.columns + i, i % 3 ? kept : -kept);
        }
      check_lines(x, ElementType::kBF16, shape, format);
    }
}

}  // namespace
}  // namespace jaxlowprec
