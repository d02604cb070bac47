// What the weight-only GEMM handlers of both platforms decode alike: the activations, the weight and the result.
#pragma once

#include "matmul_operands.h"

namespace jaxlowprec {

/// Fills in the problem but for its epilogue; `next` becomes the index of the first operand in `args` that is not the
/// weight's.
inline ffi::Error decode_weight_only(WeightOnlyProblem& p, const ffi::AnyBuffer& x_buffer, const ffi::AnyBuffer& data,
                                     const ffi::AnyBuffer& scale, const ffi::RemainingArgs& args, size_t& next,
                                     const ffi::AnyBuffer& result, const ffi::Dictionary& attributes, bool asymmetric) {
  const auto type = element_type(result.element_type()), x_type = element_type(x_buffer.element_type());
  auto format = decode_format(attributes);
  JLP_REQUIRE(type.has_value() && x_type.has_value() && format.has_value());
  const Matrices x(x_buffer), w(data), y(result);
  p = {};
  p.batch = x.batch, p.rows = x.rows, p.columns = w.rows, p.depth = x.columns;
  p.x = x_buffer.untyped_data(), p.x_type = *x_type;
  p.result = result.untyped_data(), p.type = *type;
  JLP_REQUIRE(w.batch == p.batch && y.batch == p.batch && y.rows == p.rows && y.columns == p.columns);
  if (format->scaling == Scaling::kFloat16) {
    const auto scale_type = element_type(scale.element_type());
    JLP_REQUIRE(scale_type.has_value() && *scale_type != ElementType::kF32);
    format->scale_type = *scale_type;
  }
  p.weight = {*format, bytes(data), bytes(scale), nullptr, p.depth};
  const int64_t scales = p.batch * format->scales(p.columns, p.depth);
  JLP_REQUIRE(w.columns == format->row_bytes(p.depth));
  JLP_REQUIRE(static_cast<int64_t>(scale.size_bytes()) == scales * format->scale_bytes());
  if (format->scaling == Scaling::kTwoLevel) JLP_REQUIRE((p.weight.amax = floats(args, next++, p.batch)) != nullptr);
  if (asymmetric) {
    JLP_REQUIRE(format->code == CodeType::kInt4);
    const auto zeros = args.get<ffi::Buffer<ffi::U8>>(next++);
    if (zeros.has_error()) return zeros.error();
    JLP_REQUIRE(static_cast<int64_t>(zeros->element_count()) == scales);
    p.zero_point = zeros->typed_data();
  }
  return ffi::Error::Success();
}

}  // namespace jaxlowprec
