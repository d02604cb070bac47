// Memory of CPU handlers whose chunks leave numbers for each part of an array, which are added up afterwards.
#pragma once

#include <cstdint>
#include <vector>

namespace jaxlowprec {

/// Memory for what parts find, kept per thread: in a large heap, allocating it takes as long as counting a small array. No
/// handler runs within another.
template <class T>
T* memory_of_parts(int64_t count) {
  static thread_local std::vector<T> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

}  // namespace jaxlowprec
