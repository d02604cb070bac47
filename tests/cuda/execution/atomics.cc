#include <algorithm>

#include "collectives.h"
#include "machine.h"
#include "report.h"
#include "shadow.h"

namespace {

using cuda_on_cpu::PlaceInCode;

/// Gives what was there. Threads switch only where they wait, so nothing comes between.
template <class T, class F>
T change(T* address, const void* caller, F f) {
  const PlaceInCode place = cuda_on_cpu::place_of(caller);
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T))
    cuda_on_cpu::fail("atomic operation on a misaligned address at " + cuda_on_cpu::placeholder(place));
  cuda_on_cpu::use(address, sizeof(T), cuda_on_cpu::Use::kAtomic, place);
  const T before = *address;
  *address = f(before);
  return before;
}

}  // namespace

#define ATOMIC(name, type, result)                                                                             \
  type name(type* address, type value) {                                                                       \
    return change(address, __builtin_return_address(0), [&]([[maybe_unused]] type before) { return result; }); \
  }

ATOMIC(atomicAdd, int, static_cast<int>(static_cast<unsigned>(before) + static_cast<unsigned>(value)))
ATOMIC(atomicAdd, unsigned, before + value)
ATOMIC(atomicAdd, unsigned long long, before + value)
ATOMIC(atomicAdd, float, before + value)
ATOMIC(atomicMax, int, std::max(before, value))
ATOMIC(atomicMax, unsigned, std::max(before, value))
ATOMIC(atomicMin, int, std::min(before, value))
ATOMIC(atomicMin, unsigned, std::min(before, value))
ATOMIC(atomicOr, unsigned, before | value)
ATOMIC(atomicAnd, unsigned, before& value)
ATOMIC(atomicExch, unsigned, value)

int atomicCAS(int* address, int expected, int value) {
  return change(address, __builtin_return_address(0), [&](int before) { return before == expected ? value : before; });
}
unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
  return change(address, __builtin_return_address(0), [&](unsigned before) { return before == expected ? value : before; });
}
