// Copies that land when they are waited for, not before.
#include <algorithm>

#include "collectives.h"
#include "machine.h"
#include "report.h"
#include "shadow.h"

namespace cuda_on_cpu {

namespace {

/// Of bytes that exist, or of zeros.
void start(void* shared, const void* from, uint32_t bytes, PlaceInCode place) {
  Thread& self = *machine.current;
  if (reinterpret_cast<uintptr_t>(shared) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    fail("copy_async of " + std::to_string(bytes) + " bytes: an address is not a multiple of that at " + placeholder(place));
  if (!in_shared_memory(shared)) fail("copy_async to an address outside of shared memory at " + placeholder(place));
  const AsyncCopy copy{shared, from, bytes, self.copy_groups, place};
  start_copy(copy);
  self.copies.push_back(copy);
}

}  // namespace

void copy_async(void* shared, const void* global, uint32_t bytes) {
  const PlaceInCode place = place_of(__builtin_return_address(0));
  if (reinterpret_cast<uintptr_t>(global) % bytes == 0) use(global, bytes, Use::kRead, place);
  start(shared, global, bytes, place);
}

void zero_async(void* shared, uint32_t bytes) {
  alignas(16) static constexpr uint8_t kZeros[16] = {};
  start(shared, kZeros, bytes, place_of(__builtin_return_address(0)));
}

void copy_async_commit() { ++machine.current->copy_groups; }

void copy_async_wait(int pending) {
  Thread& self = *machine.current;
  const auto landed = [&](const AsyncCopy& copy) { return copy.group + static_cast<uint32_t>(pending) < self.copy_groups; };
  for (const AsyncCopy& copy : self.copies)
    if (landed(copy)) land_copy(copy);
  self.copies.erase(std::remove_if(self.copies.begin(), self.copies.end(), landed), self.copies.end());
}

}  // namespace cuda_on_cpu
