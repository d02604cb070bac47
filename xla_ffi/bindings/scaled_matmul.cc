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
  if (auto error = decode_matmul(p, a_data, a_scale, b_data, b_scale, *result, a_attributes, b_attributes, false);
      error.failure())
    return error;
  size_t next = 0;
  if (p.a.format.scaling == Scaling::kTwoLevel) {
    JLP_REQUIRE((p.a.amax = floats(args, next++, p.batch)) != nullptr);
    JLP_REQUIRE((p.b.amax = floats(args, next++, p.batch)) != nullptr);
  }
  if (auto error = decode_epilogue(p, pool, args, next, result, results, activation, bias, accumulate); error.failure())
    return error;
  return result->element_count() == 0 ? ffi::Error::Success() : run_on(pool, "scaled_matmul", p);
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
