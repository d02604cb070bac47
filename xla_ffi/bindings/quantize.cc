#include "buffers.h"
#include "engine.h"
#include "format.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// Operands: x; for formats with a tensor scale, the amax (or the encode scale) of each direction; for stochastic rounding,
/// the key and, for each direction, the global indices of its lines (rows or columns) and of their sixteens, for all
/// matrices or, with batch axes, for each. Results: data and scale of each direction.
template <class Engine>
ffi::Error quantize(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets results,
                    ffi::Dictionary format_attributes, bool rowwise, bool columnwise, bool rotate_columns, bool stochastic,
                    bool encode_scale_given, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  const auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value() && format->code != CodeType::kInt4);
  const bool has_tensor = format->scaling == Scaling::kTwoLevel || format->scaling == Scaling::kTensor;
  const size_t directions = rowwise + columnwise, tensors = has_tensor ? directions : 0;
  JLP_REQUIRE(!rotate_columns || (format->scaling == Scaling::kTwoLevel && !format->tiles));
  JLP_REQUIRE(!encode_scale_given || format->scaling == Scaling::kTensor);
  JLP_REQUIRE(args.size() == tensors + (stochastic ? 1 + 2 * directions : 0));
  JLP_REQUIRE(results.size() == 2 * directions);
  const Matrices m(x);
  QuantizeProblem p{};
  p.x = x.untyped_data(), p.type = *type, p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.format = *format, p.encode_scale_given = encode_scale_given;
  p.rotate_columns = rotate_columns, p.sign_mask = static_cast<uint32_t>(sign_mask);

  for (size_t i = 0; i < directions; ++i) {
    const bool is_row = rowwise && i == 0;
    QuantizeDirection& direction = is_row ? p.rowwise : p.columnwise;
    const int64_t lines = is_row ? m.rows : m.columns, length = is_row ? m.columns : m.rows;
    auto data = results.get<ffi::AnyBuffer>(2 * i), scale = results.get<ffi::AnyBuffer>(2 * i + 1);
    if (data.has_error()) return data.error();
    if (scale.has_error()) return scale.error();
    JLP_REQUIRE(static_cast<int64_t>((*data)->size_bytes()) == m.batch * lines * format->row_bytes(length));
    JLP_REQUIRE(static_cast<int64_t>((*scale)->size_bytes()) ==
                m.batch * format->scales(lines, length) * format->scale_bytes());
    direction.data = static_cast<uint8_t*>(written(engine, **data));
    direction.scale = static_cast<uint8_t*>(written(engine, **scale));
    if (has_tensor) {
      const auto tensor = args.get<ffi::Buffer<ffi::F32>>(i);
      if (tensor.has_error()) return tensor.error();
      JLP_REQUIRE(static_cast<int64_t>(tensor->element_count()) == m.batch);
      direction.tensor = tensor->typed_data();
    }
    if (!stochastic) continue;
    const auto key = args.get<ffi::Buffer<ffi::U32>>(tensors);
    const auto line_ids = args.get<ffi::Buffer<ffi::U32>>(tensors + 1 + 2 * i);
    const auto sixteen_ids = args.get<ffi::Buffer<ffi::U32>>(tensors + 2 + 2 * i);
    if (key.has_error()) return key.error();
    if (line_ids.has_error()) return line_ids.error();
    if (sixteen_ids.has_error()) return sixteen_ids.error();
    JLP_REQUIRE(static_cast<int64_t>(key->element_count()) == 2 * m.batch);
    const int64_t sixteens = (length + 15) / 16, lines_given = static_cast<int64_t>(line_ids->element_count());
    const int64_t sixteens_given = static_cast<int64_t>(sixteen_ids->element_count());
    JLP_REQUIRE(lines_given == lines || lines_given == m.batch * lines);
    JLP_REQUIRE(sixteens_given == sixteens || sixteens_given == m.batch * sixteens);
    direction.random = {key->typed_data(),
                        line_ids->typed_data(),
                        sixteen_ids->typed_data(),
                        static_cast<uint32_t>(!is_row),
                        lines_given == lines ? 0 : lines,
                        sixteens_given == sixteens ? 0 : sixteens};
  }
  return m.size() > 0 ? run_on(engine, "quantize", p) : ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_HANDLERS(quantize, .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Dictionary>("format")
                                  .Attr<bool>("rowwise")
                                  .Attr<bool>("columnwise")
                                  .Attr<bool>("rotate_columns")
                                  .Attr<bool>("stochastic")
                                  .Attr<bool>("encode_scale_given")
                                  .Attr<int32_t>("sign_mask"));

}  // namespace jaxlowprec
