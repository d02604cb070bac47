// Decoding the operands and results of a quantisation, for the handlers that have one.
#pragma once

#include "../numerics/nvfp4.h"
#include "buffers.h"
#include "engine.h"
#include "format.h"

#define JLP_QUANTIZE_ATTRIBUTES         \
  .Attr<ffi::Dictionary>("format")      \
      .Attr<bool>("rowwise")            \
      .Attr<bool>("columnwise")         \
      .Attr<bool>("rotate_columns")     \
      .Attr<bool>("stochastic")         \
      .Attr<bool>("encode_scale_given") \
      .Attr<int32_t>("sign_mask")

namespace jaxlowprec {

/// A quantisation as attributes describe it, and where its operands and results begin among a handler's.
struct QuantizeOperands {
  bool rowwise, columnwise, stochastic;
  size_t first_operand = 0, first_result = 0, further_results = 0;  // further: after its own
  bool eden = false;                                                // random bits are for scales

  size_t directions() const { return size_t{rowwise} + columnwise; }
  size_t tensors(const Format& format) const {
    return format.scaling == Scaling::kTwoLevel || format.scaling == Scaling::kTensor ? directions() : 0;
  }
  size_t operands(const Format& format) const { return tensors(format) + (stochastic ? 1 + 2 * directions() : 0); }
  size_t results() const { return 2 * directions(); }
};

/// Sets the directions of a problem whose sizes and format are known. Operands: for formats with a tensor scale, the amax
/// (or the encode scale) of each direction; for stochastic rounding, of codes or of scales, the key and, for each direction,
/// the global indices of its lines (rows or columns) and of their sixteens, for all matrices or, with batch axes, for each.
/// Results: data and scale of each direction.
template <class Engine>
ffi::Error read_directions(Engine& engine, const QuantizeOperands& given, const ffi::RemainingArgs& args,
                           ffi::RemainingRets& results, QuantizeProblem& p) {
  Format& format = p.format;
  JLP_REQUIRE(format.code != CodeType::kInt4);
  JLP_REQUIRE(!p.rotate_columns || (format.scaling == Scaling::kTwoLevel && !format.tiles));
  JLP_REQUIRE(!given.eden || (given.stochastic && format.scaling == Scaling::kTwoLevel && !format.tiles));
  JLP_REQUIRE(!format.chooses_scales() || !given.stochastic || given.eden);
  JLP_REQUIRE(!p.encode_scale_given || format.scaling == Scaling::kTensor);
  size_t tensors = given.tensors(format);
  if (format.scaling == Scaling::kRows && args.size() > given.first_operand + given.operands(format))
    tensors = given.directions();  // amaxes of lines, found elsewhere
  JLP_REQUIRE(args.size() == given.first_operand + given.operands(format) - given.tensors(format) + tensors);
  JLP_REQUIRE(format.scaling != Scaling::kRows || !given.columnwise || tensors > 0);
  JLP_REQUIRE(results.size() == given.first_result + given.results() + given.further_results);
  p.eden = given.eden;
  for (size_t i = 0; i < given.directions(); ++i) {
    const bool is_row = given.rowwise && i == 0;
    QuantizeDirection& direction = is_row ? p.rowwise : p.columnwise;
    const int64_t lines = is_row ? p.rows : p.columns, length = is_row ? p.columns : p.rows;
    const size_t place = given.first_result + 2 * i;
    auto data = results.get<ffi::AnyBuffer>(place), scale = results.get<ffi::AnyBuffer>(place + 1);
    if (data.has_error()) return data.error();
    if (scale.has_error()) return scale.error();
    JLP_REQUIRE(take_scale_type(format, **scale));
    JLP_REQUIRE(static_cast<int64_t>((*data)->size_bytes()) == p.batch * lines * format.row_bytes(length));
    JLP_REQUIRE(static_cast<int64_t>((*scale)->size_bytes()) ==
                p.batch * format.scales(lines, length) * format.scale_bytes());
    direction.data = static_cast<uint8_t*>(written(engine, **data));
    direction.scale = static_cast<uint8_t*>(written(engine, **scale));
    size_t operand = given.first_operand + i;
    if (tensors > 0) {
      const auto tensor = args.get<ffi::Buffer<ffi::F32>>(operand);
      if (tensor.has_error()) return tensor.error();
      const int64_t each = format.scaling == Scaling::kRows ? lines : 1;
      JLP_REQUIRE(static_cast<int64_t>(tensor->element_count()) == p.batch * each);
      direction.tensor = tensor->typed_data();
    }
    if (!given.stochastic) continue;
    operand = given.first_operand + tensors;
    const auto key = args.get<ffi::Buffer<ffi::U32>>(operand);
    const auto line_ids = args.get<ffi::Buffer<ffi::U32>>(operand + 1 + 2 * i);
    const auto sixteen_ids = args.get<ffi::Buffer<ffi::U32>>(operand + 2 + 2 * i);
    if (key.has_error()) return key.error();
    if (line_ids.has_error()) return line_ids.error();
    if (sixteen_ids.has_error()) return sixteen_ids.error();
    JLP_REQUIRE(static_cast<int64_t>(key->element_count()) == 2 * p.batch);
    const int64_t sixteens = (length + 15) / 16, lines_given = static_cast<int64_t>(line_ids->element_count());
    const int64_t sixteens_given = static_cast<int64_t>(sixteen_ids->element_count());
    JLP_REQUIRE(lines_given == lines || lines_given == p.batch * lines);
    JLP_REQUIRE(sixteens_given == sixteens || sixteens_given == p.batch * sixteens);
    direction.random = {key->typed_data(),
                        line_ids->typed_data(),
                        sixteen_ids->typed_data(),
                        static_cast<uint32_t>(!is_row) + (given.eden ? kEdenStream : 0),
                        lines_given == lines ? 0 : lines,
                        sixteens_given == sixteens ? 0 : sixteens};
  }
  return ffi::Error::Success();
}

}  // namespace jaxlowprec
