// Decoding XLA buffers into what the kernels take: element types, [batch..., rows, columns] shapes, typed pointers.
#pragma once

#include <optional>
#include <string>

#include "../problems.h"
#include "xla/ffi/api/ffi.h"

namespace jaxlowprec {

namespace ffi = xla::ffi;

inline std::optional<ElementType> element_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return ElementType::kBF16;
    case ffi::DataType::F16: return ElementType::kF16;
    case ffi::DataType::F32: return ElementType::kF32;
    default: return std::nullopt;
  }
}

/// A buffer seen as a batch of matrices.
struct Matrices {
  int64_t batch = 1, rows = 0, columns = 0;

  explicit Matrices(const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    const size_t rank = dims.size();
    columns = rank > 0 ? dims[rank - 1] : 1;
    rows = rank > 1 ? dims[rank - 2] : 1;
    for (size_t i = 0; i + 2 < rank; ++i) batch *= dims[i];
  }
  int64_t size() const { return batch * rows * columns; }
};

/// The data of a 1-byte type (uint8, float8_e4m3fn: XLA maps no C++ type to the latter).
inline uint8_t* bytes(const ffi::AnyBuffer& buffer) { return static_cast<uint8_t*>(buffer.untyped_data()); }

inline ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("jaxlowprec: " + message); }

/// Python checks shapes before it calls; these checks keep a hand-written custom call from reading past a buffer's end.
#define JLP_REQUIRE(condition) \
  if (!(condition)) return invalid("operands do not fit each other: " #condition)

}  // namespace jaxlowprec
