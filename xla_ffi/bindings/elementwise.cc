// Amaxes, Hadamard transforms, and codes back to numbers.
#include "buffers.h"
#include "engine.h"
#include "format.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// x -> [amax], [amax after the columnwise rotation]; either may be left out.
template <class Engine>
ffi::Error amax(Engine engine, ffi::AnyBuffer x, ffi::RemainingRets results, bool plain, bool rotated, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value());
  JLP_REQUIRE(results.size() == static_cast<size_t>(plain + rotated));
  const Matrices m(x);
  AmaxProblem p{x.untyped_data(), *type, m.batch, m.rows, m.columns, nullptr, nullptr, static_cast<uint32_t>(sign_mask)};
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    JLP_REQUIRE((*result)->element_type() == ffi::DataType::F32);
    JLP_REQUIRE(static_cast<int64_t>((*result)->element_count()) == m.batch);
    uint32_t* bits = static_cast<uint32_t*>((*result)->untyped_data());
    clear(engine, bits, m.batch);
    (plain && i == 0 ? p.plain : p.rotated) = bits;
  }
  return run_on(engine, "amax", p);
}

/// x -> [amaxes of rows], [amaxes of columns]; either may be left out.
template <class Engine>
ffi::Error line_amaxes(Engine engine, ffi::AnyBuffer x, ffi::RemainingRets results, bool rows, bool columns) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value() && results.size() == static_cast<size_t>(rows + columns));
  const Matrices m(x);
  LineAmaxesProblem p{x.untyped_data(), *type, m.batch, m.rows, m.columns, nullptr, nullptr};
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (result.has_error()) return result.error();
    const bool of_rows = rows && i == 0;
    const int64_t count = m.batch * (of_rows ? m.rows : m.columns);
    JLP_REQUIRE(static_cast<int64_t>((*result)->element_count()) == count);
    uint32_t* bits = reinterpret_cast<uint32_t*>((*result)->typed_data());
    clear(engine, bits, count);
    (of_rows ? p.of_rows : p.of_columns) = bits;
  }
  return run_on(engine, "line_amaxes", p);
}

/// `signs` holds 0 or 1 (negative) for each of the transform's elements, or zeros where they are drawn: an operand of four
/// words a matrix.
template <class Engine>
ffi::Error hadamard(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs drawn, ffi::Result<ffi::AnyBuffer> result,
                    bool vertical, bool inverse, ffi::Span<const int32_t> signs) {
  const auto type = element_type(x.element_type());
  const Matrices m(x);
  const int64_t size = static_cast<int64_t>(signs.size());
  JLP_REQUIRE(type.has_value());
  JLP_REQUIRE(size >= 16 && size <= 256 && (size & (size - 1)) == 0);
  JLP_REQUIRE((vertical ? m.rows : m.columns) % size == 0);
  JLP_REQUIRE(result->element_count() == x.element_count());
  uint32_t sign_bits[256];
  for (int64_t i = 0; i < size; ++i) sign_bits[i] = signs[i] ? 0x80000000u : 0u;
  HadamardProblem p{x.untyped_data(),           *type,    m.batch, m.rows,    m.columns,
                    static_cast<int32_t>(size), vertical, inverse, sign_bits, written(engine, *result)};
  JLP_REQUIRE(drawn.size() <= 1);
  if (drawn.size() == 1) {
    const auto words = drawn.get<ffi::Buffer<ffi::U32>>(0);
    if (words.has_error()) return words.error();
    JLP_REQUIRE(size <= kDrawnSigns && static_cast<int64_t>(words->element_count()) == 4 * m.batch);
    p.drawn_signs = words->typed_data();
  }
  return m.size() > 0 ? run_on(engine, "hadamard", p) : ffi::Error::Success();
}

/// data, scale and, for two-level formats, the amax -> the numbers they stand for.
template <class Engine>
ffi::Error dequantize(Engine engine, ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::RemainingArgs args,
                      ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary format_attributes, bool rotate,
                      int32_t sign_mask) {
  const auto type = element_type(result->element_type());
  auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value() && format->code != CodeType::kInt4);
  JLP_REQUIRE(take_scale_type(*format, scale));
  const Matrices m(*result);
  const bool two_level = format->scaling == Scaling::kTwoLevel;
  JLP_REQUIRE(!rotate || two_level);
  JLP_REQUIRE(args.size() == static_cast<size_t>(two_level));
  JLP_REQUIRE(static_cast<int64_t>(data.size_bytes()) == m.batch * m.rows * format->row_bytes(m.columns));
  JLP_REQUIRE(static_cast<int64_t>(scale.size_bytes()) ==
              m.batch * format->scales(m.rows, m.columns) * format->scale_bytes());
  DequantizeProblem p{};
  p.format = *format, p.data = bytes(data), p.scale = bytes(scale);
  p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.rotate = rotate, p.sign_mask = static_cast<uint32_t>(sign_mask);
  p.result = written(engine, *result), p.type = *type;
  if (two_level) {
    const auto amax = args.get<ffi::Buffer<ffi::F32>>(0);
    if (amax.has_error()) return amax.error();
    JLP_REQUIRE(static_cast<int64_t>(amax->element_count()) == m.batch);
    p.amax = amax->typed_data();
  }
  return m.size() > 0 ? run_on(engine, "dequantize", p) : ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_HANDLERS(
    amax, .Arg<ffi::AnyBuffer>().RemainingRets().Attr<bool>("plain").Attr<bool>("rotated").Attr<int32_t>("sign_mask"));

JLP_DEFINE_HANDLERS(line_amaxes, .Arg<ffi::AnyBuffer>().RemainingRets().Attr<bool>("rows").Attr<bool>("columns"));

JLP_DEFINE_HANDLERS(hadamard, .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("vertical")
                                  .Attr<bool>("inverse")
                                  .Attr<ffi::Span<const int32_t>>("signs"));

JLP_DEFINE_HANDLERS(dequantize, .Arg<ffi::AnyBuffer>()
                                    .Arg<ffi::AnyBuffer>()
                                    .RemainingArgs()
                                    .Ret<ffi::AnyBuffer>()
                                    .Attr<ffi::Dictionary>("format")
                                    .Attr<bool>("rotate")
                                    .Attr<int32_t>("sign_mask"));

}  // namespace jaxlowprec
