// Activations, norms, and sums over rows.
#include "buffers.h"
#include "engine.h"
#include "handlers.h"
#include "producer_operands.h"
#include "quantize_operands.h"
#include "sums_of_parts.h"

#if defined(JLP_CUDA)
#include "../cuda/producers/norm_parts.h"
#endif

namespace jaxlowprec {
namespace {

/// Which amaxes of each result are wanted, as jaxlowprec/ops/amax.py names them.
struct WantedAmaxes {
  bool plain, rotated;
  int32_t sign_mask;

  size_t count() const { return size_t{plain} + rotated; }

  /// Those of a result, from `place` on among the results, zeroed; nothing if they are other buffers.
  template <class Engine>
  std::optional<ResultAmaxes> at(Engine& engine, const ffi::RemainingRets& results, size_t place, int64_t batch) const {
    ResultAmaxes found{nullptr, nullptr, static_cast<uint32_t>(sign_mask)};
    for (uint32_t** target : {plain ? &found.plain : nullptr, rotated ? &found.rotated : nullptr}) {
      if (!target) continue;
      *target = reinterpret_cast<uint32_t*>(floats(results, place++, batch));
      if (!*target) return std::nullopt;
      clear(engine, *target, batch);
    }
    return found;
  }
};

/// The matrices of x, all as one.
inline Matrices taken_as_one(const ffi::AnyBuffer& x) {
  Matrices m(x);
  m.columns = m.size(), m.batch = m.rows = 1;
  return m;
}

/// x and, if it is gated, up -> the activation, and its amaxes.
template <class Engine>
ffi::Error activation(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                      ffi::RemainingRets results, std::string_view kind, bool plain, bool rotated, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  const auto rule = activation_kind(kind);
  const WantedAmaxes wanted{plain, rotated, sign_mask};
  JLP_REQUIRE(type.has_value() && rule.has_value() && args.size() <= 1 && alike(x, *result));
  JLP_REQUIRE(results.size() == wanted.count());
  const void* up = like(args, 0, x);
  JLP_REQUIRE((up != nullptr) == (args.size() == 1));
  const Matrices m = wanted.count() == 0 ? taken_as_one(x) : Matrices(x);
  const auto amaxes = wanted.at(engine, results, 0, m.batch);
  JLP_REQUIRE(amaxes.has_value());
  const ActivationProblem p{x.untyped_data(),         up,        *type,  m.batch, m.rows * m.columns, *rule,
                            written(engine, *result), m.columns, *amaxes};
  return run_on(engine, "activation", p);
}

/// dy, x and, if it is gated, up -> the gradients of x and up, the amaxes of each, and the sums over rows of each, if there
/// are any; on the GPU memory for sums of parts then: [batch, parts, 1 or 2, columns].
template <class Engine>
ffi::Error activation_gradient(Engine engine, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::RemainingArgs args,
                               ffi::Result<ffi::AnyBuffer> dx, ffi::RemainingRets results, std::string_view kind, bool plain,
                               bool rotated, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  const auto rule = activation_kind(kind);
  const WantedAmaxes wanted{plain, rotated, sign_mask};
  JLP_REQUIRE(type.has_value() && rule.has_value() && args.size() <= 1);
  const size_t gated = args.size(), gradients = 1 + gated, first_sum = gated + gradients * wanted.count();
  JLP_REQUIRE(results.size() >= first_sum);
  const size_t summed = count_of_sums(engine, results.size(), first_sum);
  JLP_REQUIRE(summed == 0 || summed == gradients);
  JLP_REQUIRE(alike(x, dy) && alike(x, *dx));
  const void* up = like(args, 0, x);
  void* dup = gated ? like(results, 0, x) : nullptr;
  JLP_REQUIRE((up != nullptr) == (gated == 1) && (dup != nullptr) == (gated == 1));
  const Matrices m = wanted.count() + summed == 0 ? taken_as_one(x) : Matrices(x);
  const auto of_dx = wanted.at(engine, results, gated, m.batch);
  const auto of_dup = gated ? wanted.at(engine, results, gated + wanted.count(), m.batch) : ResultAmaxes{};
  const auto sums = sums_at(results, first_sum, summed, m.batch * m.columns);
  JLP_REQUIRE(of_dx.has_value() && of_dup.has_value() && sums.has_value() && m.columns > 0);
  const int64_t size = m.rows * m.columns;
  const ActivationGradientProblem p{
      dy.untyped_data(), x.untyped_data(), up,     *type, m.batch, size, *rule, written(engine, *dx), dup,
      m.columns,         *of_dx,           *of_dup};
  return run_with_sums(engine, "activation_gradient", p, p.parts(), *sums, results);
}

/// A norm as attributes describe it. Operands after x: the residual if there is one, the weight, and beta if there is one.
/// Results beside the norm: the sum with a residual, the mean of layer norms, and the inverse root.
struct NormOperands {
  bool layer, residual, beta;
  float epsilon;

  size_t operands() const { return size_t{1} + residual + beta; }
  size_t results() const { return size_t{1} + residual + layer; }

  /// Sets what they are. False if they do not fit.
  bool read(const ffi::AnyBuffer& x, const ffi::RemainingArgs& args, const ffi::RemainingRets& results,
            NormProblem& p) const {
    const auto type = element_type(x.element_type());
    const Matrices m(x);
    if (!type.has_value() || args.size() < operands() || results.size() < this->results()) return false;
    p.kind = layer ? NormKind::kLayer : NormKind::kRms, p.type = *type, p.batch = m.batch, p.rows = m.rows;
    p.columns = m.columns, p.epsilon = epsilon, p.x = x.untyped_data();
    p.residual = residual ? like(args, 0, x) : nullptr;
    p.total = residual ? like(results, 0, x) : nullptr;
    p.weight = floats(args, residual, m.batch * m.columns);
    p.beta = beta ? floats(args, residual + 1, m.batch * m.columns) : nullptr;
    p.mean = layer ? floats(results, residual, m.batch * m.rows) : nullptr;
    p.inverse = floats(results, residual + layer, m.batch * m.rows);
    return ((p.residual && p.total) || !residual) && p.weight && p.inverse && (p.beta || !beta) && (p.mean || !layer);
  }
};

/// The norm, the other results of NormOperands, and the amaxes of the norm.
template <class Engine>
ffi::Error norm(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                ffi::RemainingRets results, bool layer, bool residual, bool beta, float epsilon, bool plain, bool rotated,
                int32_t sign_mask) {
  const NormOperands given{layer, residual, beta, epsilon};
  const WantedAmaxes wanted{plain, rotated, sign_mask};
  NormProblem p{};
  JLP_REQUIRE(given.read(x, args, results, p) && alike(x, *result));
  JLP_REQUIRE(args.size() == given.operands() && results.size() == given.results() + wanted.count());
  const auto amaxes = wanted.at(engine, results, given.results(), p.batch);
  JLP_REQUIRE(amaxes.has_value());
  p.result = written(engine, *result), p.amaxes = *amaxes;
  return run_on(engine, "norm", p);
}

/// The operands and results of NormOperands but the norm, and then those of `read_directions` for it.
template <class Engine>
ffi::Error norm_quantize(Engine engine, ffi::AnyBuffer x, ffi::RemainingArgs args, ffi::RemainingRets results, bool layer,
                         bool residual, bool beta, float epsilon, ffi::Dictionary format_attributes, bool rowwise,
                         bool columnwise, bool rotate_columns, bool stochastic, bool encode_scale_given, int32_t sign_mask) {
  const NormOperands given{layer, residual, beta, epsilon};
  const auto format = decode_format(format_attributes, kOnGpu<Engine>);
  NormQuantizeProblem p{};
  JLP_REQUIRE(given.read(x, args, results, p) && format.has_value() && p.rows > 0 && p.columns > 0);
  JLP_REQUIRE(format->scaling == Scaling::kE8M0 || format->scaling == Scaling::kFloat32);
  QuantizeProblem& q = p.quantize;
  q.type = p.type, q.batch = p.batch, q.rows = p.rows, q.columns = p.columns, q.format = *format;
  q.encode_scale_given = encode_scale_given, q.rotate_columns = rotate_columns;
  q.sign_mask = static_cast<uint32_t>(sign_mask);
  const QuantizeOperands directions{rowwise, columnwise, stochastic, given.operands(), given.results()};
  const ffi::Error error = read_directions(engine, directions, args, results, q);
  if (error.failure()) return error;
  return run_on(engine, "norm_quantize", p);
}

/// Parts of the rows of a norm's gradient.
inline int64_t parts_of(ffi::ThreadPool&, const NormGradientProblem& p) { return p.parts(); }
#if defined(JLP_CUDA)
inline int64_t parts_of(cudaStream_t, const NormGradientProblem& p) {
  return cuda::NormGradientParts(p.batch, p.rows).count;
}
#endif

/// dy, the sum's gradient if there is one, x, the weight, the mean of layer norms and the inverse root -> dx, the gradients
/// of the weight and, if there is one, of beta; on the GPU memory for sums of parts: [batch, parts, 1 or 2, columns].
template <class Engine>
ffi::Error norm_gradient(Engine engine, ffi::AnyBuffer dy, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> dx,
                         ffi::RemainingRets results, bool layer, bool residual) {
  const auto type = element_type(dy.element_type());
  JLP_REQUIRE(type.has_value() && alike(dy, *dx) && args.size() == size_t{3} + residual + layer);
  const Matrices m(dy);
  NormGradientProblem p{};
  p.kind = layer ? NormKind::kLayer : NormKind::kRms, p.type = *type, p.batch = m.batch, p.rows = m.rows;
  p.columns = m.columns, p.dy = dy.untyped_data(), p.dx = written(engine, *dx);
  p.of_total = residual ? like(args, 0, dy) : nullptr;
  p.x = like(args, residual, dy);
  p.weight = floats(args, residual + 1, m.batch * m.columns);
  p.mean = layer ? floats(args, residual + 2, m.batch * m.rows) : nullptr;
  p.inverse = floats(args, residual + 2 + layer, m.batch * m.rows);
  JLP_REQUIRE(p.x && p.weight && p.inverse && (p.of_total || !residual) && (p.mean || !layer));
  const size_t count = count_of_sums(engine, results.size(), 0);
  const auto sums = sums_at(results, 0, count, m.batch * m.columns);
  JLP_REQUIRE(count >= 1 && count <= 2 && p.columns > 0 && sums.has_value());
  p.has_beta = count > 1;
  return run_with_sums(engine, "norm_gradient", p, parts_of(engine, p), *sums, results);
}

/// x -> the sums of its columns, float32 [batch, columns]; on the GPU memory for sums of parts: [batch, parts, columns].
template <class Engine>
ffi::Error sum_over_rows(Engine engine, ffi::AnyBuffer x, ffi::RemainingRets results) {
  const auto type = element_type(x.element_type());
  const Matrices m(x);
  const size_t count = count_of_sums(engine, results.size(), 0);
  const auto sums = sums_at(results, 0, count, m.batch * m.columns);
  JLP_REQUIRE(type.has_value() && count == 1 && sums.has_value());
  const SumOverRowsProblem p{x.untyped_data(), *type, m.batch, m.rows, m.columns};
  return run_with_sums(engine, "sum_over_rows", p, p.parts(), *sums, results);
}

}  // namespace

#define JLP_AMAX_ATTRIBUTES .Attr<bool>("plain").Attr<bool>("rotated").Attr<int32_t>("sign_mask")

JLP_DEFINE_HANDLERS(
    activation, .Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().Attr<std::string_view>("kind")
                    JLP_AMAX_ATTRIBUTES);
JLP_DEFINE_HANDLERS(activation_gradient, .Arg<ffi::AnyBuffer>()
                                             .Arg<ffi::AnyBuffer>()
                                             .RemainingArgs()
                                             .Ret<ffi::AnyBuffer>()
                                             .RemainingRets()
                                             .Attr<std::string_view>("kind") JLP_AMAX_ATTRIBUTES);
#define JLP_NORM_ATTRIBUTES .Attr<bool>("layer").Attr<bool>("residual").Attr<bool>("beta").Attr<float>("epsilon")

JLP_DEFINE_HANDLERS(norm, .Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets()
                              JLP_NORM_ATTRIBUTES JLP_AMAX_ATTRIBUTES);
JLP_DEFINE_HANDLERS(norm_quantize,
                    .Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets() JLP_NORM_ATTRIBUTES JLP_QUANTIZE_ATTRIBUTES);
JLP_DEFINE_HANDLERS(
    norm_gradient,
    .Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>().RemainingRets().Attr<bool>("layer").Attr<bool>("residual"));

JLP_DEFINE_HANDLERS(sum_over_rows, .Arg<ffi::AnyBuffer>().RemainingRets());

}  // namespace jaxlowprec
