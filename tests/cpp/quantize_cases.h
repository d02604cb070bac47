// The cases of the quantisation tests of the CPU and of the GPU: formats, modes, numbers, and the expected results.
#pragma once

#include "check.h"
#include "format_makers.h"
#include "kernel_data.h"
#include "quantize_reference.h"

namespace jaxlowprec {

struct Shape {
  int64_t rows, columns;
};

inline std::string name(Shape shape) { return std::to_string(shape.rows) + "x" + std::to_string(shape.columns); }

struct NamedFormat {
  const char* name;
  Format format;
  bool encode_scale_given = false;
  bool eden = false;  // random bits are for scales

  uint32_t stream(bool columnwise) const { return columnwise + (eden ? kEdenStream : 0); }
};

constexpr NamedFormat kNvfp4[] = {{"NVFP4", nvfp4(false)}, {"NVFP4 tiles", nvfp4(true)}};
constexpr NamedFormat kChosenScales[] = {
    {"NVFP4 four over six", nvfp4(false, ScaleRule::kFourOverSix)},
    {"NVFP4 four over six, squared", nvfp4(false, ScaleRule::kFourOverSixMse)},
    {"NVFP4 search", nvfp4(false, ScaleRule::kSearch)},
    {"NVFP4 tiles four over six", nvfp4(true, ScaleRule::kFourOverSix)},
    {"NVFP4 tiles four over six, squared", nvfp4(true, ScaleRule::kFourOverSixMse)},
    {"NVFP4 tiles search", nvfp4(true, ScaleRule::kSearch)},
};
constexpr NamedFormat kEden[] = {
    {"NVFP4, eden", nvfp4(false), false, true},
    {"NVFP4 four over six, eden", nvfp4(false, ScaleRule::kFourOverSix), false, true},
    {"NVFP4 four over six, squared, eden", nvfp4(false, ScaleRule::kFourOverSixMse), false, true},
    {"NVFP4 search, eden", nvfp4(false, ScaleRule::kSearch), false, true},
};
constexpr NamedFormat kOtherFormats[] = {
    {"MXFP8 E4M3 up", mx(CodeType::kE4M3, false, ScaleRule::kUp)},
    {"MXFP8 E4M3 floor", mx(CodeType::kE4M3, false, ScaleRule::kFloor)},
    {"MXFP8 E4M3 tiles even", mx(CodeType::kE4M3, true, ScaleRule::kEven)},
    {"MXFP8 E5M2 even", mx(CodeType::kE5M2, false, ScaleRule::kEven)},
    {"MXFP8 E5M2 tiles up", mx(CodeType::kE5M2, true, ScaleRule::kUp)},
    {"MXFP4 up", mx(CodeType::kE2M1, false, ScaleRule::kUp)},
    {"MXFP4 floor", mx(CodeType::kE2M1, false, ScaleRule::kFloor)},
    {"MXFP4 even", mx(CodeType::kE2M1, false, ScaleRule::kEven)},
    {"MXFP4 tiles up", mx(CodeType::kE2M1, true, ScaleRule::kUp)},
    {"MXFP4 tiles floor", mx(CodeType::kE2M1, true, ScaleRule::kFloor)},
    {"Float8Block E4M3 power of two", float8_block(CodeType::kE4M3, false, true, 0)},
    {"Float8Block E4M3 epsilon", float8_block(CodeType::kE4M3, false, false, 1.5f)},
    {"Float8Block E4M3 tiles", float8_block(CodeType::kE4M3, true, false, 0)},
    {"Float8Block E5M2 subnormal epsilon", float8_block(CodeType::kE5M2, false, false, 1e-39f)},
    {"Float8Block E5M2 tiles power of two epsilon", float8_block(CodeType::kE5M2, true, true, 1e-6f)},
    {"Float8Tensor E4M3", float8_tensor(CodeType::kE4M3, false, 0)},
    {"Float8Tensor E4M3 power of two epsilon", float8_tensor(CodeType::kE4M3, true, 2)},
    {"Float8Tensor E5M2", float8_tensor(CodeType::kE5M2, false, 0)},
    {"Float8Tensor E4M3 encode scale", float8_tensor(CodeType::kE4M3, false, 0), true},
    {"Float8Tensor E5M2 encode scale", float8_tensor(CodeType::kE5M2, false, 0), true},
};
constexpr NamedFormat kLineFormats[] = {
    {"Float8Rows E4M3", line_format(CodeType::kE4M3)},
    {"Float8Rows E4M3 bfloat16 scales", line_format(CodeType::kE4M3, ElementType::kBF16)},
    {"Float8Rows E4M3 float16 scales, least scale", line_format(CodeType::kE4M3, ElementType::kF16, 1e-3f)},
    {"Float8Rows E5M2 least scale", line_format(CodeType::kE5M2, ElementType::kF32, 4.4e-6f)},
    {"Int8Rows", line_format(CodeType::kInt8)},
    {"Int8Rows bfloat16 scales", line_format(CodeType::kInt8, ElementType::kBF16)},
    {"Int8Rows float16 scales, compressed-tensors",
     line_format(CodeType::kInt8, ElementType::kF16, 0, ScaleRule::kCompressedTensors)},
    {"Int8Rows compressed-tensors", line_format(CodeType::kInt8, ElementType::kF32, 0, ScaleRule::kCompressedTensors)},
};
/// The elements, blocks and rules for scales that meet in none of the others: each rule is one whatever the element, so few
/// numbers are enough.
constexpr NamedFormat kFurtherFormats[] = {
    {"MXFP8 E4M3 even", mx(CodeType::kE4M3, false, ScaleRule::kEven)},
    {"MXFP8 E4M3 tiles up", mx(CodeType::kE4M3, true, ScaleRule::kUp)},
    {"MXFP8 E4M3 tiles floor", mx(CodeType::kE4M3, true, ScaleRule::kFloor)},
    {"MXFP8 E5M2 up", mx(CodeType::kE5M2, false, ScaleRule::kUp)},
    {"MXFP8 E5M2 floor", mx(CodeType::kE5M2, false, ScaleRule::kFloor)},
    {"MXFP8 E5M2 tiles floor", mx(CodeType::kE5M2, true, ScaleRule::kFloor)},
    {"MXFP8 E5M2 tiles even", mx(CodeType::kE5M2, true, ScaleRule::kEven)},
    {"MXFP4 tiles even", mx(CodeType::kE2M1, true, ScaleRule::kEven)},
    {"Float8Block E4M3", float8_block(CodeType::kE4M3, false, false, 0)},
    {"Float8Block E4M3 tiles power of two", float8_block(CodeType::kE4M3, true, true, 0)},
    {"Float8Block E5M2 power of two", float8_block(CodeType::kE5M2, false, true, 0)},
    {"Float8Block E5M2 tiles epsilon", float8_block(CodeType::kE5M2, true, false, 1.5f)},
    {"Float8Tensor E4M3 power of two", float8_tensor(CodeType::kE4M3, true, 0)},
    {"Float8Tensor E5M2 power of two", float8_tensor(CodeType::kE5M2, true, 0)},
    {"Float8Tensor E4M3 large epsilon", float8_tensor(CodeType::kE4M3, false, 100)},
};

struct Mode {
  const char* name;
  bool rowwise, columnwise, rotate;
};
constexpr Mode kModes[] = {
    {"rowwise", true, false, false},           {"columnwise", false, true, false},      {"both", true, true, false},
    {"columnwise rotated", false, true, true}, {"both, one rotated", true, true, true},
};

/// Numbers and the amax they are quantised with: their own unless a caller gave another one.
struct Numbers {
  const char* name;
  Data data;
  float times;  // the amax found
  float given;  // or this, where positive or zero
};
constexpr float kFound = -1;
constexpr Numbers kNumbers[] = {
    {"normal", Data::kNormal, 1, kFound},
    {"sparse", Data::kSparse, 1, kFound},
    {"wide", Data::kWide, 1, kFound},
    {"zero", Data::kZero, 1, kFound},
    {"NaN", Data::kNaN, 1, kFound},
    {"infinity", Data::kInfinity, 1, kFound},
    {"amax too small: elements saturate", Data::kNormal, 0.1f, kFound},
    {"amax too large: scales underflow", Data::kNormal, 1e6f, kFound},
    {"NaN, finite amax: one block is poisoned", Data::kNaN, 1, 3},
    {"infinity, finite amax: one block is poisoned", Data::kInfinity, 1, 3},
    {"wide, any amax", Data::kWide, 1, 3},
    {"subnormal amax", Data::kSparse, 1, 1e-39f},
    {"any bits", Data::kAnyBits, 1, kFound},
    {"any exponents", Data::kExponents, 1, kFound},
};

/// One direction's inputs and expected results.
struct Direction {
  bool wanted;
  Format format;
  int64_t batch, lines, length;
  bool own_rows, own_sixteens;  // whether each matrix has indices of its own
  bool amaxes_given = true;     // of lines that have a scale each
  Buffer tensor, rows, sixteens, data, scale;

  Direction(bool wanted, const Format& format, int64_t batch, int64_t lines, int64_t length, uint32_t own)
      : wanted(wanted),
        format(format),
        batch(batch),
        lines(lines),
        length(length),
        own_rows(own % 2),
        own_sixteens(own / 2 % 2),
        tensor(batch * amaxes() * 4),
        rows((own_rows ? batch : 1) * lines * 4),
        sixteens((own_sixteens ? batch : 1) * ((length + 15) / 16) * 4),
        data(batch * lines * format.row_bytes(length)),
        scale(batch * format.scales(lines, length) * format.scale_bytes()) {
    for (int64_t i = 0; i < rows.size() / 4; ++i) rows.as<uint32_t>()[i] = static_cast<uint32_t>(1000 + 7 * i);
    for (int64_t i = 0; i < sixteens.size() / 4; ++i) sixteens.as<uint32_t>()[i] = static_cast<uint32_t>(50 + 3 * i);
  }

  bool has_tensor() const {
    return format.scaling == Scaling::kTwoLevel || format.scaling == Scaling::kTensor ||
           (format.scaling == Scaling::kRows && amaxes_given);
  }
  /// Of a matrix.
  int64_t amaxes() const { return format.scaling == Scaling::kRows ? lines : 1; }

  void set_inputs(QuantizeDirection& direction, const uint32_t* key, uint32_t stream) const {
    if (has_tensor()) direction.tensor = tensor.as<float>();
    if (key) direction.random = random(key, rows.as<uint32_t>(), sixteens.as<uint32_t>(), stream);
  }

  /// With pointers into whatever memory.
  Random random(const uint32_t* key, const uint32_t* row_ids, const uint32_t* sixteen_ids, uint32_t stream) const {
    return {key, row_ids, sixteen_ids, stream, own_rows ? lines : 0, own_sixteens ? (length + 15) / 16 : 0};
  }

  /// Fills in the amax, or the encode scale, of every batch entry, and from it the expected bytes.
  void expect(const QuantizeProblem& p, const QuantizeDirection& direction, bool columnwise, const Numbers* const* numbers) {
    for (int64_t b = 0; b < batch; ++b) {
      const reference::Lines x =
          reference::lines_of(p, b, columnwise, columnwise && p.rotate_columns, std::max(format.block, 16));
      if (format.scaling == Scaling::kRows) {
        for (int64_t line = 0; line < lines; ++line)
          tensor.as<float>()[b * lines + line] = reference::amax_of_line(x, line) * numbers[b]->times;
        if (wanted)
          reference::quantize(p, x, direction, b, length, data.as() + b * (data.size() / batch),
                              scale.as() + b * (scale.size() / batch));
        continue;
      }
      const float found = Lanes<float>::from_bits(reference::amax_bits(x));
      const float amax = numbers[b]->given >= 0 ? numbers[b]->given : found * numbers[b]->times;
      const bool other = format.scaling == Scaling::kTensor && columnwise && b == 1;
      const float own = other ? amax / 2 : amax;  // directions of Float8Tensor need not have the same
      tensor.as<float>()[b] = p.encode_scale_given ? 300 / own : own;
      if (wanted)
        reference::quantize(p, x, direction, b, length, data.as() + b * (data.size() / batch),
                            scale.as() + b * (scale.size() / batch));
    }
  }

  void check(const Buffer& found_data, const Buffer& found_scale) const {
    if (!wanted) return;
    CHECK_EQ(first_difference(found_scale, scale), -1);
    CHECK_EQ(first_difference(found_data, data), -1);
  }
};

/// Two matrices x to quantise, and the expected results of both directions.
struct QuantizeCase {
  static constexpr int64_t kBatch = 2;
  Buffer key;
  Direction rowwise, columnwise;
  QuantizeProblem problem;

  QuantizeCase(const Buffer& x, Shape shape, ElementType type, const NamedFormat& format, const Mode& mode, bool stochastic,
               const Numbers* const (&numbers)[2], std::mt19937& random)
      : key(kBatch * 8),
        rowwise(mode.rowwise, format.format, kBatch, shape.rows, shape.columns, random()),
        columnwise(mode.columnwise, format.format, kBatch, shape.columns, shape.rows, random()),
        problem{x.as(), type, kBatch,      shape.rows,      shape.columns, format.format, format.encode_scale_given,
                {},     {},   mode.rotate, kDefaultSignMask} {
    problem.eden = format.eden;
    for (int64_t i = 0; i < 2 * kBatch; ++i) key.as<uint32_t>()[i] = static_cast<uint32_t>(random());
    rowwise.amaxes_given = mode.columnwise || random() % 2;
    if (mode.rowwise) rowwise.set_inputs(problem.rowwise, stochastic ? key.as<uint32_t>() : nullptr, format.stream(false));
    if (mode.columnwise)
      columnwise.set_inputs(problem.columnwise, stochastic ? key.as<uint32_t>() : nullptr, format.stream(true));
    rowwise.expect(problem, problem.rowwise, false, numbers), columnwise.expect(problem, problem.columnwise, true, numbers);
  }
};

constexpr NamedFormat kRowScaled[] = {kNvfp4[0], kChosenScales[0], kChosenScales[1], kChosenScales[2]};

/// Two matrices x whose rows are tensors of their own: what is expected of as many matrices of one row. Rows are of
/// different kinds.
struct RowScaledCase {
  static constexpr int64_t kBatch = 2;
  Buffer x;
  Direction rows;
  RowScaledQuantizeProblem problem;

  RowScaledCase(Shape shape, ElementType type, const Format& format, int64_t misalignment, std::mt19937& random)
      : x(kBatch * shape.rows * shape.columns * reference::element_size(type), misalignment),
        rows(true, format, kBatch * shape.rows, 1, shape.columns, 0),
        problem{x.as(), type, kBatch, shape.rows, shape.columns, format, nullptr, nullptr, nullptr} {
    const Data kinds[] = {Data::kNormal,       Data::kSparse, Data::kWide,    Data::kZero,
                          Data::kNegativeZero, Data::kNaN,    Data::kInfinity};
    for (int64_t row = 0; row < rows.batch; ++row)
      fill_elements(x.as(), type, row * shape.columns, shape.columns, kinds[random() % std::size(kinds)], random);
    QuantizeProblem each{x.as(), type, rows.batch, 1, shape.columns, format, false, {}, {}, false, 0};
    rows.set_inputs(each.rowwise, nullptr, 0);
    const std::vector<const Numbers*> own(rows.batch, &kNumbers[0]);
    rows.expect(each, each.rowwise, false, own.data());
  }
};

}  // namespace jaxlowprec
