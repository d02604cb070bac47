// What the CPU's GEMM handlers decode alike: the operands and results of the epilogue.
#pragma once

#include "engine.h"
#include "matmul_operands.h"

namespace jaxlowprec {

/// Fills in the epilogue of a problem that has its sizes, from operand `next` on: the bias, what to accumulate onto, and the
/// input of the activation whose gradient is wanted, each where given. `activation` is "none", "gelu" or "dgelu"; a further
/// result is what GELU was applied to.
inline ffi::Error decode_epilogue(MatmulResult& p, ffi::ThreadPool& pool, const ffi::RemainingArgs& args, size_t next,
                                  ffi::Result<ffi::AnyBuffer>& result, const ffi::RemainingRets& results,
                                  std::string_view activation, bool bias, bool accumulate) {
  const bool gelu = activation == "gelu", gradient = activation == "dgelu", empty = result->element_count() == 0;
  JLP_REQUIRE(gelu || gradient || activation == "none");
  JLP_REQUIRE(args.size() == next + bias + accumulate + gradient);
  JLP_REQUIRE(results.size() <= static_cast<size_t>(gelu));
  p.threads = pool.num_threads();
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
  return ffi::Error::Success();
}

}  // namespace jaxlowprec
