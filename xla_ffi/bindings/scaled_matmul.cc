#include "../cpu/run.h"
#include "buffers.h"
#include "cpu_handlers.h"
#include "format.h"

namespace jaxlowprec {
namespace {

/// a and b as data and scale; then, where given, both amaxes of two-level formats, the bias, what to accumulate onto, and
/// the input of the activation whose gradient is wanted -> result, pre-activation. `activation` is "none", "gelu" or
/// "dgelu".
ffi::Error scaled_matmul(ffi::ThreadPool pool, ffi::AnyBuffer a_data, ffi::AnyBuffer a_scale, ffi::AnyBuffer b_data,
                         ffi::AnyBuffer b_scale, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                         ffi::RemainingRets results, ffi::Dictionary a_attributes, ffi::Dictionary b_attributes,
                         std::string_view activation, bool bias, bool accumulate) {
  const auto type = element_type(result->element_type());
  const auto a_format = decode_format(a_attributes), b_format = decode_format(b_attributes);
  JLP_REQUIRE(type.has_value() && a_format.has_value() && b_format.has_value());
  const Matrices a(a_data), b(b_data), y(*result);
  const auto operand = [](const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale, const Format& format, int64_t columns) {
    return MatmulOperand{format, bytes(data), bytes(scale), nullptr, format.packed() ? 2 * columns : columns};
  };
  MatmulProblem p{};
  p.a = operand(a_data, a_scale, *a_format, a.columns), p.b = operand(b_data, b_scale, *b_format, b.columns);
  p.batch = a.batch, p.rows = a.rows, p.columns = b.rows;
  p.result = result->untyped_data(), p.type = *type, p.threads = pool.num_threads();
  JLP_REQUIRE(matmul_supports(p));
  JLP_REQUIRE(a.batch == b.batch && a.batch == y.batch && y.rows == a.rows && y.columns == b.rows);
  const auto fits = [](const MatmulOperand& o, const Matrices& data, const ffi::AnyBuffer& scale) {
    const int64_t scales = o.format.scales(data.rows, o.columns) * o.format.scale_bytes();
    return o.format.row_bytes(o.columns) == data.columns && static_cast<int64_t>(scale.size_bytes()) == data.batch * scales;
  };
  JLP_REQUIRE(fits(p.a, a, a_scale) && fits(p.b, b, b_scale));

  const bool two_level = a_format->scaling == Scaling::kTwoLevel;
  const bool gelu = activation == "gelu", gradient = activation == "dgelu";
  JLP_REQUIRE(gelu || gradient || activation == "none");
  JLP_REQUIRE(args.size() == static_cast<size_t>(2 * two_level + bias + accumulate + gradient));
  JLP_REQUIRE(results.size() <= static_cast<size_t>(gelu));
  size_t next = 0;
  const auto floats = [&](int64_t count) -> const float* {  // the next operand, if it is that many float32
    const auto values = args.get<ffi::Buffer<ffi::F32>>(next++);
    return values.has_error() || static_cast<int64_t>(values->element_count()) != count ? nullptr : values->typed_data();
  };
  const auto like_result = [&](ElementType& values_type) -> const void* {
    const auto values = args.get<ffi::AnyBuffer>(next++);
    if (values.has_error() || values->element_count() != result->element_count()) return nullptr;
    const auto found = element_type(values->element_type());
    if (!found) return nullptr;
    values_type = *found;
    return values->untyped_data();
  };
  if (two_level) {
    JLP_REQUIRE((p.a.amax = floats(p.batch)) != nullptr);
    JLP_REQUIRE((p.b.amax = floats(p.batch)) != nullptr);
  }
  if (bias) JLP_REQUIRE((p.bias = floats(p.batch * p.columns)) != nullptr || y.size() == 0);
  if (accumulate) JLP_REQUIRE((p.accumulate = like_result(p.accumulate_type)) != nullptr || y.size() == 0);
  if (gradient) JLP_REQUIRE((p.activation_input = like_result(p.activation_input_type)) != nullptr || y.size() == 0);
  p.activation = gelu ? Activation::kGeluTanh : gradient ? Activation::kGeluTanhGradient : Activation::kNone;
  if (results.size() > 0) {
    auto pre_activation = results.get<ffi::AnyBuffer>(0);
    if (pre_activation.has_error()) return pre_activation.error();
    JLP_REQUIRE((*pre_activation)->element_type() == result->element_type());
    JLP_REQUIRE((*pre_activation)->element_count() == result->element_count());
    p.pre_activation = written(**pre_activation);
  }
  written(*result);
  if (y.size() > 0) run(pool, p);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_scaled_matmul, scaled_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<ffi::Dictionary>("a_format")
                                  .Attr<ffi::Dictionary>("b_format")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("bias")
                                  .Attr<bool>("accumulate"));

}  // namespace jaxlowprec
