// numerics.md counts subnormal float32 as zero. XLA runs its kernels with the processor set to do so; this scope makes it
// so whoever calls, unit tests included, and costs a few nanoseconds.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jaxlowprec {

class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlush); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlush = 0x8040;  // flush-to-zero and denormals-are-zero
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

#if defined(__SSE2__) || defined(__aarch64__)
constexpr bool kHardwareFlushes = true;
#else
constexpr bool kHardwareFlushes = false;
#endif

}  // namespace jaxlowprec
