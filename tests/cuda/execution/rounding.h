// The processor's floating-point modes.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "Kernels are executed on x86-64 or aarch64"
#endif

namespace cuda_on_cpu {

#if defined(__x86_64__)
using FloatMode = unsigned;
inline FloatMode float_mode() { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }
constexpr FloatMode kFlushToZero = 0x8040, kTowardZero = 0x6000;  // FTZ and DAZ; RC
#else
using FloatMode = uint64_t;
inline FloatMode float_mode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
constexpr FloatMode kFlushToZero = 1u << 24, kTowardZero = 3u << 22;
#endif

// Each sets a mode and gives the one before.
inline FloatMode flushing_to_zero() {
  const FloatMode before = float_mode();
  set_float_mode(before | kFlushToZero);
  return before;
}
inline FloatMode keeping_subnormals() {
  const FloatMode before = float_mode();
  set_float_mode(before & ~kFlushToZero);
  return before;
}
inline FloatMode rounding_toward_zero() {
  const FloatMode before = float_mode();
  set_float_mode(before | kTowardZero);
  return before;
}

}  // namespace cuda_on_cpu
