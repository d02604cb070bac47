// Activations and their gradients that are quantised and not stored.
#include "engine.h"
#include "handlers.h"
#include "producer_operands.h"
#include "quantize_operands.h"

namespace jaxlowprec {
namespace {

/// How a result is quantised, as attributes describe it; nothing if its format has a tensor scale.
std::optional<QuantizeProblem> quantization(const ffi::AnyBuffer& x, const std::optional<Format>& format,
                                            bool rotate_columns, bool encode_scale_given, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  const Matrices m(x);
  if (!type.has_value() || !format.has_value() || m.rows == 0 || m.columns == 0) return std::nullopt;
  if (format->scaling != Scaling::kE8M0 && format->scaling != Scaling::kFloat32) return std::nullopt;
  QuantizeProblem q{};
  q.type = *type, q.batch = m.batch, q.rows = m.rows, q.columns = m.columns, q.format = *format;
  q.encode_scale_given = encode_scale_given, q.rotate_columns = rotate_columns;
  q.sign_mask = static_cast<uint32_t>(sign_mask);
  return q;
}

/// x, up if `gated`, and those of `read_directions` for the activation -> its codes and scales.
template <class Engine>
ffi::Error activation_quantize(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets results,
                               std::string_view kind, bool gated, ffi::Dictionary format, bool rowwise, bool columnwise,
                               bool rotate_columns, bool stochastic, bool encode_scale_given, int32_t sign_mask) {
  const auto rule = activation_kind(kind);
  const auto q = quantization(x, decode_format(format, kOnGpu<Engine>), rotate_columns, encode_scale_given, sign_mask);
  JLP_REQUIRE(rule.has_value() && q.has_value());
  ActivationQuantizeProblem p{};
  p.x = x.untyped_data(), p.up = gated ? like(args, 0, x) : nullptr, p.kind = *rule;
  p.type = q->type, p.batch = q->batch, p.size = q->rows * q->columns, p.columns = q->columns, p.quantize = *q;
  JLP_REQUIRE(p.up || !gated);
  const QuantizeOperands directions{rowwise, columnwise, stochastic, gated};
  const ffi::Error error = read_directions(engine, directions, args, results, p.quantize);
  return error.failure() ? error : run_on(engine, "activation_quantize", p);
}

/// dy, x and up if `gated` -> codes and scales of the gradient of x, and of that of up.
template <class Engine>
ffi::Error activation_gradient_quantize(Engine engine, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::RemainingArgs args,
                                        ffi::RemainingRets results, std::string_view kind, bool gated,
                                        ffi::Dictionary format, bool rowwise, bool columnwise, bool rotate_columns,
                                        bool stochastic, bool encode_scale_given, int32_t sign_mask) {
  const auto rule = activation_kind(kind);
  const auto q = quantization(x, decode_format(format, kOnGpu<Engine>), rotate_columns, encode_scale_given, sign_mask);
  JLP_REQUIRE(rule.has_value() && q.has_value() && !stochastic && alike(dy, x));
  ActivationGradientQuantizeProblem p{};
  p.dy = dy.untyped_data(), p.x = x.untyped_data(), p.up = gated ? like(args, 0, x) : nullptr, p.kind = *rule;
  p.type = q->type, p.batch = q->batch, p.size = q->rows * q->columns, p.columns = q->columns;
  JLP_REQUIRE(p.up || !gated);
  QuantizeOperands directions{rowwise, columnwise, stochastic, gated};
  for (int i = 0; i < 1 + gated; ++i) {
    p.quantize[i] = *q;
    directions.first_result = i * directions.results(), directions.further_results = (gated - i) * directions.results();
    const ffi::Error error = read_directions(engine, directions, args, results, p.quantize[i]);
    if (error.failure()) return error;
  }
  return run_on(engine, "activation_gradient_quantize", p);
}

}  // namespace

#define JLP_ACTIVATION_ATTRIBUTES .Attr<std::string_view>("kind").Attr<bool>("gated")

JLP_DEFINE_HANDLERS(activation_quantize, .Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets()
                                             JLP_ACTIVATION_ATTRIBUTES JLP_QUANTIZE_ATTRIBUTES);
JLP_DEFINE_HANDLERS(activation_gradient_quantize,
                    .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets()
                        JLP_ACTIVATION_ATTRIBUTES JLP_QUANTIZE_ATTRIBUTES);

}  // namespace jaxlowprec
