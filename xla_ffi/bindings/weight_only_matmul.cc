#include "engine.h"
#include "handlers.h"
#include "matmul_operands.h"

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

/// x; then each weight [N, K] as data and scale and, where its format has them, amax or zero points, and its bias where
/// given
/// -> a result of each. The products are one list of chunks: short ones share a start.
ffi::Error weight_only_matmuls(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets results,
                               ffi::Dictionary format, bool asymmetric, bool bias) {
  std::vector<WeightOnlyProblem> problems;
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    const auto data = args.get<ffi::AnyBuffer>(next++);
    if (data.has_error()) return data.error();
    const auto scale = args.get<ffi::AnyBuffer>(next++);
    if (scale.has_error()) return scale.error();
    WeightOnlyProblem p;
    if (auto error = decode_weight_only(p, x, *data, *scale, args, next, **result, format, asymmetric); error.failure())
      return error;
    const bool empty = (*result)->element_count() == 0;
    if (bias) JLP_REQUIRE((p.bias = floats(args, next++, p.batch * p.columns)) != nullptr || empty);
    p.threads = pool.num_threads();
    written(pool, **result);
    if (!empty) problems.push_back(p);
  }
  JLP_REQUIRE(next == args.size());
  run_all(pool, problems);
  return ffi::Error::Success();
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

JLP_DEFINE_CPU_HANDLER(weight_only_matmuls, weight_only_matmuls,
                       .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<ffi::Dictionary>("format")
                           .Attr<bool>("asymmetric")
                           .Attr<bool>("bias"));

}  // namespace jaxlowprec
