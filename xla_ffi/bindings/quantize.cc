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

}  // namespace

JLP_DEFINE_HANDLERS(quantize,
                    .Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets() JLP_QUANTIZE_ATTRIBUTES.Attr<bool>("eden"));

}  // namespace jaxlowprec
