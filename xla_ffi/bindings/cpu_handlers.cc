#include "cpu_handlers.h"

#include <cstring>

#include "../cpu/run.h"
#include "buffers.h"

namespace jaxlowprec {
namespace {

constexpr int64_t kBlock = 16;
int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

/// x -> [amax], [amax after the columnwise rotation]; either may be left out.
ffi::Error amax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingRets results, bool plain, bool rotated,
                int32_t sign_mask) {
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
    std::memset(bits, 0, m.batch * sizeof *bits);
    (plain && i == 0 ? p.plain : p.rotated) = bits;
  }
  run(pool, p);
  return ffi::Error::Success();
}

/// x, an amax a direction, and for stochastic rounding the key and, a direction, the global indices of its lines (rows,
/// or columns) and of its blocks -> data and scale a direction.
ffi::Error quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets results,
                    bool rowwise, bool columnwise, bool tiles, bool rotate_columns, bool stochastic, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  const size_t directions = rowwise + columnwise;
  JLP_REQUIRE(type.has_value());
  JLP_REQUIRE(!(tiles && rotate_columns));
  JLP_REQUIRE(args.size() == directions + (stochastic ? 1 + 2 * directions : 0));
  JLP_REQUIRE(results.size() == 2 * directions);
  const Matrices m(x);
  QuantizeProblem p{};
  p.x = x.untyped_data(), p.type = *type, p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.tiles = tiles, p.rotate_columns = rotate_columns, p.sign_mask = static_cast<uint32_t>(sign_mask);

  for (size_t i = 0; i < directions; ++i) {
    const bool is_row = rowwise && i == 0;
    QuantizeDirection& direction = is_row ? p.rowwise : p.columnwise;
    const int64_t lines = is_row ? m.rows : m.columns, blocks = blocks_of(is_row ? m.columns : m.rows);
    const auto amax = args.get<ffi::Buffer<ffi::F32>>(i);
    auto data = results.get<ffi::AnyBuffer>(2 * i), scale = results.get<ffi::AnyBuffer>(2 * i + 1);
    if (amax.has_error()) return amax.error();
    if (data.has_error()) return data.error();
    if (scale.has_error()) return scale.error();
    JLP_REQUIRE(static_cast<int64_t>(amax->element_count()) == m.batch);
    JLP_REQUIRE(static_cast<int64_t>((*data)->element_count()) == m.batch * lines * blocks * 8);
    JLP_REQUIRE(static_cast<int64_t>((*scale)->element_count()) == m.batch * (tiles ? blocks_of(lines) : lines) * blocks);
    direction.amax = amax->typed_data(), direction.data = static_cast<uint8_t*>(written(**data));
    direction.scale = static_cast<uint8_t*>(written(**scale));
    if (!stochastic) continue;
    const auto key = args.get<ffi::Buffer<ffi::U32>>(directions);
    const auto line_ids = args.get<ffi::Buffer<ffi::U32>>(directions + 1 + 2 * i);
    const auto block_ids = args.get<ffi::Buffer<ffi::U32>>(directions + 2 + 2 * i);
    if (key.has_error()) return key.error();
    if (line_ids.has_error()) return line_ids.error();
    if (block_ids.has_error()) return block_ids.error();
    JLP_REQUIRE(static_cast<int64_t>(key->element_count()) == 2 * m.batch);
    JLP_REQUIRE(static_cast<int64_t>(line_ids->element_count()) == lines);
    JLP_REQUIRE(static_cast<int64_t>(block_ids->element_count()) == blocks);
    direction.random = {key->typed_data(), line_ids->typed_data(), block_ids->typed_data(), static_cast<uint32_t>(!is_row)};
  }
  if (m.size() > 0) run(pool, p);
  return ffi::Error::Success();
}

ffi::Error dequantize(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::Buffer<ffi::F32> amax,
                      ffi::Result<ffi::AnyBuffer> result, bool tiles, bool rotate, int32_t sign_mask) {
  const auto type = element_type(result->element_type());
  const Matrices m(*result);
  const int64_t blocks = blocks_of(m.columns);
  JLP_REQUIRE(type.has_value());
  JLP_REQUIRE(static_cast<int64_t>(data.element_count()) == m.batch * m.rows * blocks * 8);
  JLP_REQUIRE(static_cast<int64_t>(scale.element_count()) == m.batch * (tiles ? blocks_of(m.rows) : m.rows) * blocks);
  JLP_REQUIRE(static_cast<int64_t>(amax.element_count()) == m.batch);
  const DequantizeProblem p{bytes(data),
                            bytes(scale),
                            amax.typed_data(),
                            m.batch,
                            m.rows,
                            m.columns,
                            tiles,
                            rotate,
                            static_cast<uint32_t>(sign_mask),
                            written(*result),
                            *type};
  if (m.size() > 0) run(pool, p);
  return ffi::Error::Success();
}

/// `signs` holds 0 or 1 (negative) for each of the transform's elements.
ffi::Error hadamard(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> result, bool vertical, bool inverse,
                    ffi::Span<const int32_t> signs) {
  const auto type = element_type(x.element_type());
  const Matrices m(x);
  const int64_t size = static_cast<int64_t>(signs.size());
  JLP_REQUIRE(type.has_value());
  JLP_REQUIRE(size >= 16 && size <= 256 && (size & (size - 1)) == 0);
  JLP_REQUIRE((vertical ? m.rows : m.columns) % size == 0);
  JLP_REQUIRE(result->element_count() == x.element_count());
  uint32_t sign_bits[256];
  for (int64_t i = 0; i < size; ++i) sign_bits[i] = signs[i] ? 0x80000000u : 0u;
  const HadamardProblem p{x.untyped_data(),           *type,    m.batch, m.rows,    m.columns,
                          static_cast<int32_t>(size), vertical, inverse, sign_bits, written(*result)};
  if (m.size() > 0) run(pool, p);
  return ffi::Error::Success();
}

/// a and b as data, scale and amax, then the bias and what to accumulate onto where given -> result, pre-activation.
ffi::Error scaled_matmul(ffi::ThreadPool pool, ffi::AnyBuffer a_data, ffi::AnyBuffer a_scale, ffi::Buffer<ffi::F32> a_amax,
                         ffi::AnyBuffer b_data, ffi::AnyBuffer b_scale, ffi::Buffer<ffi::F32> b_amax,
                         ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result, ffi::RemainingRets results,
                         bool a_tiles, bool b_tiles, bool bias, bool accumulate, bool gelu) {
  const auto type = element_type(result->element_type());
  const Matrices a(a_data), b(b_data), y(*result);
  MatmulProblem p{};
  p.a = {bytes(a_data), bytes(a_scale), a_amax.typed_data(), a_tiles};
  p.b = {bytes(b_data), bytes(b_scale), b_amax.typed_data(), b_tiles};
  p.batch = a.batch, p.rows = a.rows, p.columns = b.rows, p.blocks = a.columns / 8;
  JLP_REQUIRE(type.has_value());
  JLP_REQUIRE(a.columns % 8 == 0 && a.columns == b.columns);
  JLP_REQUIRE(a.batch == b.batch && a.batch == y.batch && y.rows == a.rows && y.columns == b.rows);
  const auto scales = [&](const Matrices& m, bool tiles) {
    return m.batch * (tiles ? blocks_of(m.rows) : m.rows) * p.blocks;
  };
  JLP_REQUIRE(static_cast<int64_t>(a_scale.element_count()) == scales(a, a_tiles));
  JLP_REQUIRE(static_cast<int64_t>(b_scale.element_count()) == scales(b, b_tiles));
  JLP_REQUIRE(static_cast<int64_t>(a_amax.element_count()) == a.batch);
  JLP_REQUIRE(static_cast<int64_t>(b_amax.element_count()) == b.batch);
  JLP_REQUIRE(args.size() == static_cast<size_t>(bias + accumulate));
  if (bias) {
    const auto values = args.get<ffi::Buffer<ffi::F32>>(0);
    if (values.has_error()) return values.error();
    JLP_REQUIRE(static_cast<int64_t>(values->element_count()) == p.batch * p.columns);
    p.bias = values->typed_data();
  }
  if (accumulate) {
    const auto values = args.get<ffi::AnyBuffer>(bias);
    if (values.has_error()) return values.error();
    const auto values_type = element_type(values->element_type());
    JLP_REQUIRE(values_type.has_value());
    JLP_REQUIRE(values->element_count() == result->element_count());
    p.accumulate = values->untyped_data(), p.accumulate_type = *values_type;
  }
  if (gelu) p.activation = Activation::kGeluTanh;
  if (results.size() > 0) {
    auto pre_activation = results.get<ffi::AnyBuffer>(0);
    if (pre_activation.has_error()) return pre_activation.error();
    JLP_REQUIRE((*pre_activation)->element_type() == result->element_type());
    JLP_REQUIRE((*pre_activation)->element_count() == result->element_count());
    p.pre_activation = written(**pre_activation);
  }
  p.result = written(*result), p.type = *type;
  if (y.size() > 0) run(pool, p);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_amax, amax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<bool>("plain")
                                  .Attr<bool>("rotated")
                                  .Attr<int32_t>("sign_mask"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_quantize, quantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("rowwise")
                                  .Attr<bool>("columnwise")
                                  .Attr<bool>("tiles")
                                  .Attr<bool>("rotate_columns")
                                  .Attr<bool>("stochastic")
                                  .Attr<int32_t>("sign_mask"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_dequantize, dequantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("tiles")
                                  .Attr<bool>("rotate")
                                  .Attr<int32_t>("sign_mask"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_hadamard, hadamard,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("vertical")
                                  .Attr<bool>("inverse")
                                  .Attr<ffi::Span<const int32_t>>("signs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_scaled_matmul, scaled_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<bool>("a_tiles")
                                  .Attr<bool>("b_tiles")
                                  .Attr<bool>("bias")
                                  .Attr<bool>("accumulate")
                                  .Attr<bool>("gelu"));

}  // namespace jaxlowprec
