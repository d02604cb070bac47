// Finding the operands and results of activations and norms among a handler's.
#pragma once

#include <string_view>

#include "buffers.h"

namespace jaxlowprec {

inline std::optional<ActivationKind> activation_kind(std::string_view name) {
  if (name == "gelu") return ActivationKind::kGelu;
  if (name == "silu") return ActivationKind::kSilu;
  if (name == "relu_squared") return ActivationKind::kReluSquared;
  return std::nullopt;
}

/// Whether two buffers have the same type and as many elements.
inline bool alike(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return a.element_type() == b.element_type() && a.element_count() == b.element_count();
}

/// The buffer of that many float32 among the arguments or results; null if it is another.
template <class Buffers>
auto floats(const Buffers& buffers, size_t place, int64_t count) {
  using Pointer = float*;
  if (place >= buffers.size()) return Pointer{};
  auto found = buffers.template get<ffi::AnyBuffer>(place);
  if (found.has_error()) return Pointer{};
  if constexpr (std::is_same<Buffers, ffi::RemainingRets>::value) {
    ffi::AnyBuffer& buffer = **found;
    const bool fits = buffer.element_type() == ffi::DataType::F32 && static_cast<int64_t>(buffer.element_count()) == count;
    return fits ? static_cast<Pointer>(buffer.untyped_data()) : Pointer{};
  } else {
    const bool fits = found->element_type() == ffi::DataType::F32 && static_cast<int64_t>(found->element_count()) == count;
    return fits ? static_cast<Pointer>(found->untyped_data()) : Pointer{};
  }
}

/// The buffer like `x` there; null if it is another.
template <class Buffers>
void* like(const Buffers& buffers, size_t place, const ffi::AnyBuffer& x) {
  if (place >= buffers.size()) return nullptr;
  auto found = buffers.template get<ffi::AnyBuffer>(place);
  if (found.has_error()) return nullptr;
  if constexpr (std::is_same<Buffers, ffi::RemainingRets>::value) {
    return alike(**found, x) ? (*found)->untyped_data() : nullptr;
  } else {
    return alike(*found, x) ? found->untyped_data() : nullptr;
  }
}

}  // namespace jaxlowprec
