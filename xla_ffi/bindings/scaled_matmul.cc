#include "engine.h"
#include "handlers.h"
#include "matmul_operands.h"

namespace jaxlowprec {
namespace {

/// a and b as data and scale; then, where given, both amaxes of two-level formats, the bias, what to accumulate onto, and
/// the input of the activation whose gradient is wanted -> result, pre-activation. `activation` is "none", "gelu" or
/// "dgelu".
ffi::Error scaled_matmul(ffi::ThreadPool pool, ffi::AnyBuffer a_data, ffi::AnyBuffer a_scale, ffi::AnyBuffer b_data,
                         ffi::AnyBuffer b_scale, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                         ffi::RemainingRets results, ffi::Dictionary a_attributes, ffi::Dictionary b_attributes,
                         std::string_view activation, bool bias, bool accumulate) {
  MatmulProblem p;
  if (auto error = decode_matmul(p, a_data, a_scale, b_data, b_scale, *result, a_attributes, b_attributes); error.failure())
    return error;
  p.threads = pool.num_threads();
  const bool two_level = p.a.format.scaling == Scaling::kTwoLevel, empty = result->element_count() == 0;
  const bool gelu = activation == "gelu", gradient = activation == "dgelu";
  JLP_REQUIRE(gelu || gradient || activation == "none");
  JLP_REQUIRE(args.size() == static_cast<size_t>(2 * two_level + bias + accumulate + gradient));
  JLP_REQUIRE(results.size() <= static_cast<size_t>(gelu));
  size_t next = 0;
  if (two_level) {
    JLP_REQUIRE((p.a.amax = floats(args, next++, p.batch)) != nullptr);
    JLP_REQUIRE((p.b.amax = floats(args, next++, p.batch)) != nullptr);
  }
  if (bias) JLP_REQUIRE((p.bias = floats(args, next++, p.batch * p.columns)) != nullptr || empty);
  if (accumulate) JLP_REQUIRE((p.accumulate = like_result(args, next++, *result, p.accumulate_type)) != nullptr || empty);
  if (gradient)
    JLP_REQUIRE((p.activation_input = like_result(args, next++, *result, p.activation_input_type)) != nullptr || empty);
  p.activation = gelu ? Activation::kGeluTanh : gradient ? Activation::kGeluTanhGradient : Activation::kNone;
  if (results.size() > 0) {
    auto pre_activation = results.get<ffi::AnyBuffer>(0);
    if (pre_activation.has_error()) return pre_activation.error();
    JLP_REQUIRE((*pre_activation)->element_type() == result->element_type());
    JLP_REQUIRE((*pre_activation)->element_count() == result->element_count());
    p.pre_activation = written(pool, **pre_activation);
  }
  written(pool, *result);
  return empty ? ffi::Error::Success() : run_on(pool, "scaled_matmul", p);
}

}  // namespace

JLP_DEFINE_CPU_HANDLER(scaled_matmul, scaled_matmul,
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
