#include "buffers.h"
#include "engine.h"
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

}  // namespace

JLP_DEFINE_HANDLERS(
    amax, .Arg<ffi::AnyBuffer>().RemainingRets().Attr<bool>("plain").Attr<bool>("rotated").Attr<int32_t>("sign_mask"));

}  // namespace jaxlowprec
