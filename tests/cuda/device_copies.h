// The arrays of a problem as an executed kernel sees them: inputs that may only be read, results that must all be written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <random>
#include <vector>

#include "../cpp/kernel_data.h"

namespace jaxlowprec {

/// Bytes in the device's memory that begin at a multiple of 16, or `misalignment` after one.
class DeviceBytes {
 public:
  /// A result.
  DeviceBytes(int64_t bytes, int64_t misalignment, const char* name)
      : array_(bytes + misalignment, name), misalignment_(misalignment) {}
  /// An input.
  DeviceBytes(const Buffer& buffer, int64_t misalignment, const char* name)
      : array_(padded(buffer, misalignment), name, cuda_on_cpu::Access::kReadOnly), misalignment_(misalignment) {}

  template <class T = uint8_t>
  T* as() const {
    return reinterpret_cast<T*>(array_.data() + misalignment_);
  }
  cuda_on_cpu::Traffic traffic() const { return array_.traffic(); }
  int64_t unwritten() const { return static_cast<int64_t>(array_.unwritten()) - misalignment_; }

  /// Index of the first byte that differs, -1 for none.
  int64_t first_difference(const Buffer& expected) const {
    for (int64_t i = 0; i < expected.size(); ++i)
      if (as()[i] != expected.as()[i]) return i;
    return -1;
  }

 private:
  static std::vector<uint8_t> padded(const Buffer& buffer, int64_t misalignment) {
    std::vector<uint8_t> bytes(misalignment);
    bytes.insert(bytes.end(), buffer.as(), buffer.as() + buffer.size());
    return bytes;
  }
  cuda_on_cpu::Array<uint8_t> array_;
  int64_t misalignment_;
};

/// Another order of threads for every run: a right kernel gives the same bytes in each.
inline void vary_order(std::mt19937& random) {
  cuda_on_cpu::options().order = static_cast<cuda_on_cpu::Order>(random() % 3);
  cuda_on_cpu::options().seed = random();
}

}  // namespace jaxlowprec
