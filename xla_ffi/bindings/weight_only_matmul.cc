#include "engine.h"
#include "epilogue_operands.h"
#include "handlers.h"
#include "weight_operands.h"

namespace jaxlowprec {
namespace {

/// x, the weight as data and scale and, where its format has them, amax or zero points; then, where given, the bias, what to
/// accumulate onto, and the input of the activation whose gradient is wanted -> result, pre-activation.
ffi::Error weight_only_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                              ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result, ffi::RemainingRets results,
                              ffi::Dictionary format, bool asymmetric, std::string_view activation, bool bias,
                              bool accumulate) {
  WeightOnlyProblem p;
  size_t next = 0;
  if (auto error = decode_weight_only(p, x, data, scale, args, next, *result, format, asymmetric); error.failure())
    return error;
  if (auto error = decode_epilogue(p, pool, args, next, result, results, activation, bias, accumulate); error.failure())
    return error;
  return result->element_count() == 0 ? ffi::Error::Success() : run_on(pool, "weight_only_matmul", p);
}

}  // namespace

JLP_DEFINE_CPU_HANDLER(weight_only_matmul, weight_only_matmul,
                       .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<ffi::Dictionary>("format")
                           .Attr<bool>("asymmetric")
                           .Attr<std::string_view>("activation")
                           .Attr<bool>("bias")
                           .Attr<bool>("accumulate"));

}  // namespace jaxlowprec
