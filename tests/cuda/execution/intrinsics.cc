#include "intrinsics.h"

#include <climits>

#include "rounding.h"

namespace cuda_on_cpu {

float fma_toward_zero(float a, float b, float c) {
  const FloatMode mode = rounding_toward_zero();
  // The compiler knows nothing of rounding modes: it must not move the operation out of this one.
  asm volatile("" : "+m"(a), "+m"(b), "+m"(c));
  float y = fmaf(a, b, c);
  asm volatile("" : "+m"(y));
  set_float_mode(mode);
  return y;
}

uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i & 15;
    uint32_t byte = bytes >> 8 * (which & 7) & 0xFF;
    if (which & 8) byte = byte & 0x80 ? 0xFF : 0;  // the sign of the byte, replicated
    y |= byte << 8 * i;
  }
  return y;
}

int saturated_int(float integer) {
  if (integer != integer) return 0;
  if (integer >= 2147483648.0f) return INT_MAX;
  if (integer <= -2147483648.0f) return INT_MIN;
  return static_cast<int>(integer);
}

}  // namespace cuda_on_cpu
