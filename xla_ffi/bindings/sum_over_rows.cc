#include "buffers.h"
#include "handlers.h"
#include "sums_of_parts.h"

namespace jaxlowprec {
namespace {

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

JLP_DEFINE_HANDLERS(sum_over_rows, .Arg<ffi::AnyBuffer>().RemainingRets());

}  // namespace jaxlowprec
