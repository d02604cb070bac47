// AdamW and Lion in one pass: gradients, weights and moments to new weights and moments (numerics.md 19).
#include "../numerics/optimizer_states.h"
#include "buffers.h"
#include "engine.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// A handler's further arguments and results, which are taken one after another.
struct Taken {
  const ffi::RemainingArgs& args;
  ffi::RemainingRets& results;
  size_t arg = 0, result = 0;
  bool fits = true;  // so far

  /// The memory of the next argument, or result, if it has that type and size.
  const void* argument(ffi::DataType type, int64_t count) {
    const auto found = args.get<ffi::AnyBuffer>(arg++);
    return found.has_value() ? memory(*found, type, count) : refused();
  }
  void* made(ffi::DataType type, int64_t count) {
    auto found = results.get<ffi::AnyBuffer>(result++);
    return found.has_value() ? memory(**found, type, count) : refused();
  }
  /// Whether the next argument has numbers of that type.
  bool next_is(ffi::DataType type) const {
    const auto found = args.get<ffi::AnyBuffer>(arg);
    return found.has_value() && found->element_type() == type;
  }

 private:
  void* memory(const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count) {
    const bool good = buffer.element_type() == type && static_cast<int64_t>(buffer.element_count()) == count;
    return good ? buffer.untyped_data() : refused();
  }
  void* refused() {
    fits = false;
    return nullptr;
  }
};

void take_moment(Taken& taken, int64_t count, int64_t exponents, bool stochastic, MomentState& moment) {
  using Type = ffi::DataType;
  moment.stochastic = stochastic;
  if (taken.next_is(Type::F32)) {
    taken.fits &= !stochastic;
    moment.numbers = static_cast<const float*>(taken.argument(Type::F32, count));
    moment.new_numbers = static_cast<float*>(taken.made(Type::F32, count));
    return;
  }
  moment.codes = static_cast<const uint8_t*>(taken.argument(Type::U8, count));
  moment.exponents = static_cast<const uint8_t*>(taken.argument(Type::U8, exponents));
  moment.new_codes = static_cast<uint8_t*>(taken.made(Type::U8, count));
  moment.new_exponents = static_cast<uint8_t*>(taken.made(Type::U8, exponents));
}

/// g, p, scalars, the remainder if there is one, each moment's numbers, or codes and exponents, and if anything is drawn the
/// words, the numbers of rows and those of blocks -> p or its update, and what was kept of the operands.
template <class Engine>
ffi::Error optimizer_update(Engine engine, ffi::AnyBuffer g, ffi::AnyBuffer p, ffi::Buffer<ffi::F32> scalars,
                            ffi::RemainingArgs args, ffi::RemainingRets results, int32_t rule, int32_t bits,
                            bool stochastic_mu, bool stochastic_nu, bool is_update) {
  using Type = ffi::DataType;
  OptimizerUpdateProblem problem{};
  const auto g_type = element_type(g.element_type()), p_type = element_type(p.element_type());
  JLP_REQUIRE(g_type.has_value() && *g_type != ElementType::kF16 && p_type.has_value() && *p_type != ElementType::kF16);
  JLP_REQUIRE(rule == static_cast<int>(UpdateRule::kAdamW) || rule == static_cast<int>(UpdateRule::kLion));
  problem.rule = static_cast<UpdateRule>(rule);
  const bool has_nu = problem.rule == UpdateRule::kAdamW;
  const int each = has_nu ? kUpdateScalars<AdamW> : kUpdateScalars<Lion>;
  JLP_REQUIRE(g.element_count() == p.element_count() && scalars.element_count() % each == 0 && (has_nu || !stochastic_nu));
  JLP_REQUIRE(bits == 0 || (*p_type == ElementType::kBF16 && (bits == 16 || bits == 24 || bits == 32)));
  const bool drawn = bits == 16 || stochastic_mu || stochastic_nu;
  const int64_t count = static_cast<int64_t>(p.element_count());
  const auto dims = p.dimensions();
  problem.columns = dims.size() > 0 ? dims[dims.size() - 1] : 1;
  problem.batch = static_cast<int64_t>(scalars.element_count()) / each;
  if (count == 0 || problem.batch == 0) return ffi::Error::Success();
  JLP_REQUIRE(count % (problem.batch * problem.columns) == 0);
  problem.rows = count / (problem.batch * problem.columns);
  const int64_t exponents = problem.batch * problem.rows * problem.blocks();

  problem.g = g.untyped_data(), problem.g_type = *g_type, problem.p = p.untyped_data();
  problem.weight = *p_type == ElementType::kF32 ? WeightKind::kFloat32
                   : bits == 32                 ? WeightKind::kRest16
                   : bits == 24                 ? WeightKind::kRest8
                   : bits == 16                 ? WeightKind::kDrawn
                                                : WeightKind::kNearest;
  problem.scalars = scalars.typed_data();
  Taken taken{args, results};
  if (is_update)
    problem.update = static_cast<float*>(taken.made(Type::F32, count));
  else
    problem.new_p = taken.made(p.element_type(), count);
  if (bits > 16) {
    const Type type = bits == 32 ? Type::S16 : Type::S8;
    problem.rest = taken.argument(type, count);
    problem.new_rest = taken.made(type, count);
  }
  take_moment(taken, count, exponents, stochastic_mu, problem.mu);
  if (has_nu) take_moment(taken, count, exponents, stochastic_nu, problem.nu);
  if (drawn) {
    problem.words = static_cast<const uint32_t*>(taken.argument(Type::U32, 4 * problem.batch));
    problem.row_numbers = static_cast<const uint32_t*>(taken.argument(Type::U32, problem.rows));
    problem.block_numbers = static_cast<const uint32_t*>(taken.argument(Type::U32, problem.blocks()));
  }
  JLP_REQUIRE(taken.fits && taken.arg == args.size() && taken.result == results.size());
  return run_on(engine, "optimizer_update", problem);
}

}  // namespace

JLP_DEFINE_HANDLERS(optimizer_update, .Arg<ffi::AnyBuffer>()
                                          .Arg<ffi::AnyBuffer>()
                                          .Arg<ffi::Buffer<ffi::F32>>()
                                          .RemainingArgs()
                                          .RemainingRets()
                                          .Attr<int32_t>("rule")
                                          .Attr<int32_t>("bits")
                                          .Attr<bool>("stochastic_mu")
                                          .Attr<bool>("stochastic_nu")
                                          .Attr<bool>("is_update"));

}  // namespace jaxlowprec
