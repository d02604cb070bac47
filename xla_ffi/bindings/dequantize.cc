#include "buffers.h"
#include "engine.h"
#include "format.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// data, scale and, for two-level formats, the amax -> the numbers they stand for.
template <class Engine>
ffi::Error dequantize(Engine engine, ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::RemainingArgs args,
                      ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary format_attributes, bool rotate,
                      int32_t sign_mask) {
  const auto type = element_type(result->element_type());
  const auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value() && format->code != CodeType::kInt4);
  const Matrices m(*result);
  const bool two_level = format->scaling == Scaling::kTwoLevel;
  JLP_REQUIRE(!rotate || two_level);
  JLP_REQUIRE(args.size() == static_cast<size_t>(two_level));
  JLP_REQUIRE(static_cast<int64_t>(data.size_bytes()) == m.batch * m.rows * format->row_bytes(m.columns));
  JLP_REQUIRE(static_cast<int64_t>(scale.size_bytes()) ==
              m.batch * format->scales(m.rows, m.columns) * format->scale_bytes());
  DequantizeProblem p{};
  p.format = *format, p.data = bytes(data), p.scale = bytes(scale);
  p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.rotate = rotate, p.sign_mask = static_cast<uint32_t>(sign_mask);
  p.result = written(engine, *result), p.type = *type;
  if (two_level) {
    const auto amax = args.get<ffi::Buffer<ffi::F32>>(0);
    if (amax.has_error()) return amax.error();
    JLP_REQUIRE(static_cast<int64_t>(amax->element_count()) == m.batch);
    p.amax = amax->typed_data();
  }
  return m.size() > 0 ? run_on(engine, "dequantize", p) : ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_HANDLERS(dequantize, .Arg<ffi::AnyBuffer>()
                                    .Arg<ffi::AnyBuffer>()
                                    .RemainingArgs()
                                    .Ret<ffi::AnyBuffer>()
                                    .Attr<ffi::Dictionary>("format")
                                    .Attr<bool>("rotate")
                                    .Attr<int32_t>("sign_mask"));

}  // namespace jaxlowprec
