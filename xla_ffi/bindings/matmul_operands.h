// What the GEMM handlers of both platforms decode alike: the operands and the result.
#pragma once

#include "buffers.h"
#include "format.h"

namespace jaxlowprec {

/// Fills in the problem but for its epilogue. `on_gpu`: scales may lie column by column.
inline ffi::Error decode_matmul(MatmulProblem& p, const ffi::AnyBuffer& a_data, const ffi::AnyBuffer& a_scale,
                                const ffi::AnyBuffer& b_data, const ffi::AnyBuffer& b_scale, ffi::AnyBuffer& result,
                                const ffi::Dictionary& a_attributes, const ffi::Dictionary& b_attributes, bool on_gpu) {
  const auto type = element_type(result.element_type());
  const auto a_format = decode_format(a_attributes, on_gpu), b_format = decode_format(b_attributes, on_gpu);
  JLP_REQUIRE(type.has_value() && a_format.has_value() && b_format.has_value());
  const Matrices a(a_data), b(b_data), y(result);
  const auto operand = [](const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale, const Format& format, int64_t columns) {
    return MatmulOperand{format, bytes(data), bytes(scale), nullptr, format.packed() ? 2 * columns : columns};
  };
  p = {};
  p.a = operand(a_data, a_scale, *a_format, a.columns), p.b = operand(b_data, b_scale, *b_format, b.columns);
  p.batch = a.batch, p.rows = a.rows, p.columns = b.rows;
  p.result = result.untyped_data(), p.type = *type;
  JLP_REQUIRE(matmul_supports(p));
  JLP_REQUIRE(a.batch == b.batch && a.batch == y.batch && y.rows == a.rows && y.columns == b.rows);
  const auto fits = [](const MatmulOperand& o, const Matrices& data, const ffi::AnyBuffer& scale) {
    const int64_t scales = o.format.scales(data.rows, o.columns) * o.format.scale_bytes();
    return o.format.row_bytes(o.columns) == data.columns && static_cast<int64_t>(scale.size_bytes()) == data.batch * scales;
  };
  JLP_REQUIRE(fits(p.a, a, a_scale) && fits(p.b, b, b_scale));
  return ffi::Error::Success();
}

/// Operand `index` as that many float32, or null if it is something else.
inline const float* floats(const ffi::RemainingArgs& args, size_t index, int64_t count) {
  const auto values = args.get<ffi::Buffer<ffi::F32>>(index);
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

}  // namespace jaxlowprec
