// What the handlers of GEMMs decode alike: quantised operands, their problems, and the epilogue.
#pragma once

#include <optional>

#include "engine.h"
#include "format.h"

namespace jaxlowprec {

/// A quantised operand of a GEMM whose buffers have the sizes that its format asks for.
struct BoundOperand : MatmulOperand {
  Matrices matrices;  // of codes: columns are bytes
};

/// The operand, or nothing where its format is not known or its buffers do not fit it. `depth`: K, where the codes' bytes do
/// not tell it. `groups`: how many groups its rows are in, which have a tensor scale each; else a matrix has one.
inline std::optional<BoundOperand> bind_operand(const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale,
                                                const ffi::Dictionary& attributes, bool may_be_column_major = false,
                                                std::optional<int64_t> depth = std::nullopt,
                                                std::optional<int64_t> groups = std::nullopt) {
  auto format = decode_format(attributes, may_be_column_major, true);
  if (!format) return std::nullopt;
  if (!take_scale_type(*format, scale)) return std::nullopt;
  const Matrices m(data);
  const int64_t columns = depth.value_or(format->packed() ? 2 * m.columns : m.columns);
  const int64_t scales = groups && format->scaling == Scaling::kTensor ? *groups : m.batch * format->scales(m.rows, columns);
  if (m.columns != format->row_bytes(columns)) return std::nullopt;
  if (static_cast<int64_t>(scale.size_bytes()) != scales * format->scale_bytes()) return std::nullopt;
  return BoundOperand{{*format, bytes(data), bytes(scale), nullptr, columns}, m};
}

/// Operand `index` as that many float32, or null if it is something else.
inline const float* floats(const ffi::RemainingArgs& args, size_t index, int64_t count) {
  const auto values = args.get<ffi::Buffer<ffi::F32>>(index);
  return values.has_error() || static_cast<int64_t>(values->element_count()) != count ? nullptr : values->typed_data();
}

/// Operand `index` as that many zero points, or null if it is something else.
inline const uint8_t* zero_points(const ffi::RemainingArgs& args, size_t index, int64_t count) {
  const auto values = args.get<ffi::Buffer<ffi::U8>>(index);
  return values.has_error() || static_cast<int64_t>(values->element_count()) != count ? nullptr : values->typed_data();
}

/// Operand `index` as an array shaped like the result and its element type, or null if it is something else.
inline const void* like_result(const ffi::RemainingArgs& args, size_t index, const ffi::AnyBuffer& result,
                               ElementType& type) {
  const auto values = args.get<ffi::AnyBuffer>(index);
  if (values.has_error() || values->element_count() != result.element_count()) return nullptr;
  const auto found = element_type(values->element_type());
  if (!found) return nullptr;
  type = *found;
  return values->untyped_data();
}

/// Fills in the problem but for its epilogue. `on_gpu`: scales may lie column by column.
inline ffi::Error decode_matmul(MatmulProblem& p, const ffi::AnyBuffer& a_data, const ffi::AnyBuffer& a_scale,
                                const ffi::AnyBuffer& b_data, const ffi::AnyBuffer& b_scale, ffi::AnyBuffer& result,
                                const ffi::Dictionary& a_attributes, const ffi::Dictionary& b_attributes, bool on_gpu) {
  const auto type = element_type(result.element_type());
  const auto a = bind_operand(a_data, a_scale, a_attributes, on_gpu),
             b = bind_operand(b_data, b_scale, b_attributes, on_gpu);
  JLP_REQUIRE(type.has_value() && a.has_value() && b.has_value());
  const Matrices y(result), &rows = a->matrices, &columns = b->matrices;
  p = {};
  p.a = *a, p.b = *b;
  p.batch = rows.batch, p.rows = rows.rows, p.columns = columns.rows;
  p.result = result.untyped_data(), p.type = *type;
  JLP_REQUIRE(matmul_supports(p));
  JLP_REQUIRE(rows.batch == columns.batch && rows.batch == y.batch && y.rows == rows.rows && y.columns == columns.rows);
  return ffi::Error::Success();
}

/// Fills in a weight-only problem but for its epilogue; `next` becomes the index of the first operand in `args` that is not
/// the weight's.
inline ffi::Error decode_weight_only(WeightOnlyProblem& p, const ffi::AnyBuffer& x_buffer, const ffi::AnyBuffer& data,
                                     const ffi::AnyBuffer& scale, const ffi::RemainingArgs& args, size_t& next,
                                     const ffi::AnyBuffer& result, const ffi::Dictionary& attributes, bool asymmetric) {
  const auto type = element_type(result.element_type()), x_type = element_type(x_buffer.element_type());
  const Matrices x(x_buffer), y(result);
  const auto weight = bind_operand(data, scale, attributes, false, x.columns);
  JLP_REQUIRE(type.has_value() && x_type.has_value() && weight.has_value());
  const Matrices& w = weight->matrices;
  p = {};
  p.batch = x.batch, p.rows = x.rows, p.columns = w.rows, p.depth = x.columns;
  p.x = x_buffer.untyped_data(), p.x_type = *x_type;
  p.result = result.untyped_data(), p.type = *type, p.weight = *weight;
  JLP_REQUIRE(w.batch == p.batch && y.batch == p.batch && y.rows == p.rows && y.columns == p.columns);
  const Format& format = p.weight.format;
  if (format.scaling == Scaling::kTwoLevel) JLP_REQUIRE((p.weight.amax = floats(args, next++, p.batch)) != nullptr);
  if (asymmetric) {
    JLP_REQUIRE(format.code == CodeType::kInt4);
    const int64_t scales = p.batch * format.scales(p.columns, p.depth);
    JLP_REQUIRE((p.zero_point = zero_points(args, next++, scales)) != nullptr || scales == 0);
  }
  return ffi::Error::Success();
}

// --- the epilogue, on the CPU

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
