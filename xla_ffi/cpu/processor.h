// Which instruction sets of x86-64 this processor has: dispatch.cc asks when the library runs, cmake/native_isas.cc when it
// is built for the processor at hand.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxlowprec {
namespace processor {

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/// What is used of AVX512_BF16, besides AVX-512.
inline bool has_avx512_bf16() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"); }

/// AMX's tiles of 8-bit integers, besides AVX-512. Linux keeps their 8 KiB of registers for the threads of a process that
/// has asked for them, which this does: it may refuse.
inline bool has_amx_int8() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

/// Whether a dot product of AVX512_BF16 takes longer than the two multiply-adds that it replaces, and so GEMMs with it take
/// longer than AVX-512's. Intel's Emerald Rapids starts one in two cycles, in which it does four multiply-adds; GEMMs of
/// 8-bit codes take it 1.6 to 2.1 times as long. AMD's Zen 5 starts two in each cycle.
inline bool bf16_dot_is_slow() { return __builtin_cpu_is("intel"); }

}  // namespace processor
}  // namespace jaxlowprec
#endif
