// Int4: fake quantisation, quantisation and its inverse. Attributes: the group size, whether groups are symmetric, whether
// they run along the columns; the deployment dtype is that of the scales.
#include "buffers.h"
#include "engine.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// A matrix (or a batch of them) and how it is quantised, or nothing where no kernel has that.
std::optional<Int4Matrices> int4_matrices(const ffi::AnyBuffer& buffer, std::optional<ElementType> scale, int64_t group,
                                          bool symmetric, bool columnwise) {
  const Matrices m(buffer);
  if (group < 1 || !scale || *scale == ElementType::kF32) return std::nullopt;
  return Int4Matrices{m.batch, m.rows, m.columns, columnwise, {group, symmetric, *scale}};
}

/// Whether a buffer has a byte, or one of the scales' type, for each group.
bool one_a_group(const ffi::AnyBuffer& buffer, const Int4Matrices& m) {
  return static_cast<int64_t>(buffer.element_count()) == m.batch * m.lines() * m.groups();
}
bool holds_codes(const ffi::AnyBuffer& buffer, const Int4Matrices& m) {
  return static_cast<int64_t>(buffer.size_bytes()) == m.batch * m.lines() * m.line_bytes();
}

template <class Engine>
ffi::Error int4_fake_quantize(Engine engine, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> result, int64_t group,
                              bool symmetric, bool columnwise, std::string_view scale_dtype) {
  const auto type = element_type(x.element_type());
  const auto scale = scale_dtype == "bfloat16"  ? std::optional(ElementType::kBF16)
                     : scale_dtype == "float16" ? std::optional(ElementType::kF16)
                                                : std::nullopt;
  const auto m = int4_matrices(x, scale, group, symmetric, columnwise);
  JLP_REQUIRE(type.has_value() && m.has_value());
  JLP_REQUIRE(*type == ElementType::kF32 || *type == *scale);
  JLP_REQUIRE(result->element_type() == x.element_type() && result->element_count() == x.element_count());
  const Int4FakeQuantizeProblem p{*m, x.untyped_data(), *type, written(engine, *result)};
  return m->batch * m->size() > 0 ? run_on(engine, "fake_quantize", p) : ffi::Error::Success();
}

/// x -> data, scale and, where asymmetric, zero points.
template <class Engine>
ffi::Error int4_quantize(Engine engine, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                         ffi::Result<ffi::AnyBuffer> scale, ffi::RemainingRets zeros, int64_t group, bool symmetric,
                         bool columnwise) {
  const auto type = element_type(x.element_type());
  const auto m = int4_matrices(x, element_type(scale->element_type()), group, symmetric, columnwise);
  JLP_REQUIRE(type.has_value() && m.has_value());
  JLP_REQUIRE(holds_codes(*data, *m) && one_a_group(*scale, *m) && zeros.size() == static_cast<size_t>(!symmetric));
  Int4QuantizeProblem p{*m,
                        x.untyped_data(),
                        *type,
                        static_cast<uint8_t*>(written(engine, *data)),
                        static_cast<uint16_t*>(scale->untyped_data()),
                        nullptr};
  if (!symmetric) {
    auto zero = zeros.get<ffi::AnyBuffer>(0);
    if (zero.has_error()) return zero.error();
    JLP_REQUIRE(one_a_group(**zero, *m) && (*zero)->size_bytes() == (*zero)->element_count());
    p.zero = bytes(**zero);
  }
  return m->batch * m->size() > 0 ? run_on(engine, "quantize", p) : ffi::Error::Success();
}

/// data, scale and, where asymmetric, zero points -> the numbers they stand for.
template <class Engine>
ffi::Error int4_dequantize(Engine engine, ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::RemainingArgs zeros,
                           ffi::Result<ffi::AnyBuffer> result, int64_t group, bool symmetric, bool columnwise) {
  const auto type = element_type(result->element_type());
  const auto m = int4_matrices(*result, element_type(scale.element_type()), group, symmetric, columnwise);
  JLP_REQUIRE(type.has_value() && m.has_value());
  JLP_REQUIRE(holds_codes(data, *m) && one_a_group(scale, *m) && zeros.size() == static_cast<size_t>(!symmetric));
  Int4DequantizeProblem p{*m, bytes(data), static_cast<const uint16_t*>(scale.untyped_data()), nullptr, nullptr, *type};
  if (!symmetric) {
    const auto zero = zeros.get<ffi::AnyBuffer>(0);
    if (zero.has_error()) return zero.error();
    JLP_REQUIRE(one_a_group(*zero, *m) && zero->size_bytes() == zero->element_count());
    p.zero = bytes(*zero);
  }
  p.result = written(engine, *result);
  return m->batch * m->size() > 0 ? run_on(engine, "dequantize", p) : ffi::Error::Success();
}

}  // namespace

#define JLP_INT4_ATTRIBUTES .Attr<int64_t>("group").Attr<bool>("symmetric").Attr<bool>("columnwise")

JLP_DEFINE_HANDLERS(int4_fake_quantize,
                    .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>() JLP_INT4_ATTRIBUTES.Attr<std::string_view>("scale_dtype"));
JLP_DEFINE_HANDLERS(int4_quantize,
                    .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets() JLP_INT4_ATTRIBUTES);
JLP_DEFINE_HANDLERS(int4_dequantize,
                    .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>() JLP_INT4_ATTRIBUTES);

}  // namespace jaxlowprec
