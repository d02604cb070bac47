#include <algorithm>

#include "buffers.h"
#include "engine.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

constexpr const char* kChanged =
    "DelayedScaling: an amax or a scale below 0, or a scale of 0, says that a transformation has changed a layer's state, "
    "whose gradient is its new value; make jaxlowprec.delayed_scaling.overwrite_with_gradient the outermost transformation "
    "of the optimizer, or with Flax's TrainState apply keep_unused(gradients, state.params), leave the gradients of states "
    "as they are, and start from a state that is intact";

/// Amaxes and scales, float32 [batch, n] -> 1 for each row, float32 [batch]; a number below 0 is an error. Other platforms
/// cannot stop a program: they give NaN.
ffi::Error intact_state(ffi::ThreadPool, ffi::Buffer<ffi::DataType::F32> numbers,
                        ffi::ResultBuffer<ffi::DataType::F32> one) {
  const float* begin = numbers.typed_data();
  if (std::any_of(begin, begin + numbers.element_count(), [](float number) { return number < 0.0f; }))
    return invalid(kChanged);
  std::fill_n(one->typed_data(), one->element_count(), 1.0f);
  return ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_CPU_HANDLER(intact_state, intact_state,
                       .Arg<ffi::Buffer<ffi::DataType::F32>>().Ret<ffi::Buffer<ffi::DataType::F32>>());

}  // namespace jaxlowprec
