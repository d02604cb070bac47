#include <cstring>

#include "../cpu/run.h"
#include "buffers.h"
#include "cpu_handlers.h"

namespace jaxlowprec {
namespace {

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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_amax, amax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<bool>("plain")
                                  .Attr<bool>("rotated")
                                  .Attr<int32_t>("sign_mask"));

}  // namespace jaxlowprec
