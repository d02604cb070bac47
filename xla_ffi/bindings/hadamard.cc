#include "buffers.h"
#include "engine.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

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

}  // namespace

JLP_DEFINE_HANDLERS(hadamard, .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("vertical")
                                  .Attr<bool>("inverse")
                                  .Attr<ffi::Span<const int32_t>>("signs"));

}  // namespace jaxlowprec
