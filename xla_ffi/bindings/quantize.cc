// Quantisation, of whole matrices and of rows that are tensors of their own.
#include "buffers.h"
#include "engine.h"
#include "format.h"
#include "handlers.h"
#include "quantize_operands.h"

namespace jaxlowprec {
namespace {

/// Operands: x, and those of `read_directions`, which has the results, too.
template <class Engine>
ffi::Error quantize(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets results,
                    ffi::Dictionary format_attributes, bool rowwise, bool columnwise, bool rotate_columns, bool stochastic,
                    bool encode_scale_given, int32_t sign_mask, bool eden) {
  const auto type = element_type(x.element_type());
  const auto format = decode_format(format_attributes, kOnGpu<Engine>);
  JLP_REQUIRE(type.has_value() && format.has_value());
  const Matrices m(x);
  QuantizeProblem p{};
  p.x = x.untyped_data(), p.type = *type, p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.format = *format, p.encode_scale_given = encode_scale_given;
  p.rotate_columns = rotate_columns, p.sign_mask = static_cast<uint32_t>(sign_mask);
  QuantizeOperands given{rowwise, columnwise, stochastic};
  given.eden = eden;
  const ffi::Error error = read_directions(engine, given, args, results, p);
  if (error.failure()) return error;
  return m.size() > 0 ? run_on(engine, "quantize", p) : ffi::Error::Success();
}

/// x -> the amax of each row, and its codes and scales.
template <class Engine>
ffi::Error row_scaled_quantize(Engine engine, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> amax,
                               ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> scale,
                               ffi::Dictionary format_attributes) {
  const auto type = element_type(x.element_type());
  const auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value());
  JLP_REQUIRE(format->scaling == Scaling::kTwoLevel && !format->tiles);
  const Matrices m(x);
  const int64_t rows = m.batch * m.rows;
  JLP_REQUIRE(static_cast<int64_t>(amax->element_count()) == rows);
  JLP_REQUIRE(static_cast<int64_t>(data->size_bytes()) == rows * format->row_bytes(m.columns));
  JLP_REQUIRE(static_cast<int64_t>(scale->size_bytes()) == rows * format->scale_columns(m.columns));
  RowScaledQuantizeProblem p{};
  p.x = x.untyped_data(), p.type = *type, p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.format = *format, p.amax = amax->typed_data();
  p.data = static_cast<uint8_t*>(written(engine, *data)), p.scale = static_cast<uint8_t*>(written(engine, *scale));
  return m.size() > 0 ? run_on(engine, "row_scaled_quantize", p) : ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_HANDLERS(quantize,
                    .Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets() JLP_QUANTIZE_ATTRIBUTES.Attr<bool>("eden"));

JLP_DEFINE_HANDLERS(
    row_scaled_quantize,
    .Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<ffi::Dictionary>(
        "format"));

}  // namespace jaxlowprec
