// Arithmetic intrinsics and cached accesses, as CUDA's manual defines them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vector_types.h"

namespace cuda_on_cpu {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

float fma_toward_zero(float a, float b, float c);
uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector);

/// Out of range: the nearest integer; a NaN: 0. As cvt.s32.f32.
int saturated_int(float integer);

/// `f` of both halves of a and b, read as T.
template <class T, class F>
uint32_t halves(uint32_t a, uint32_t b, F f) {
  const uint32_t low = static_cast<uint16_t>(f(static_cast<T>(a), static_cast<T>(b)));
  return low | static_cast<uint32_t>(static_cast<uint16_t>(f(static_cast<T>(a >> 16), static_cast<T>(b >> 16)))) << 16;
}

}  // namespace cuda_on_cpu

// --- float32. Each operation is rounded once, and nothing is subnormal while a kernel runs

inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return cuda_on_cpu::bit_cast<int>(x); }
inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return cuda_on_cpu::bit_cast<float>(bits); }

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmaf_rz(float a, float b, float c) { return cuda_on_cpu::fma_toward_zero(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmul_rz(float a, float b) {
  return cuda_on_cpu::fma_toward_zero(a, b, std::signbit(a) != std::signbit(b) ? -0.0f : 0.0f);
}
inline float __fadd_rz(float a, float b) { return cuda_on_cpu::fma_toward_zero(a, 1.0f, b); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline int __float2int_rn(float x) { return cuda_on_cpu::saturated_int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return cuda_on_cpu::saturated_int(truncf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// --- integers

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0F0F0F0Fu) | (x & 0x0F0F0F0Fu) << 4;
  return __builtin_bswap32(x);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return cuda_on_cpu::byte_permute(a, b, selector); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }

// CUDA's min and max, which kernels call without a namespace.
#define CUDA_ON_CPU_MIN_MAX(result, a_type, b_type)                                                            \
  constexpr result min(a_type a, b_type b) { return static_cast<result>(a) < static_cast<result>(b) ? a : b; } \
  constexpr result max(a_type a, b_type b) { return static_cast<result>(a) < static_cast<result>(b) ? b : a; }
CUDA_ON_CPU_MIN_MAX(int, int, int)
CUDA_ON_CPU_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_ON_CPU_MIN_MAX(unsigned, int, unsigned)
CUDA_ON_CPU_MIN_MAX(unsigned, unsigned, int)
CUDA_ON_CPU_MIN_MAX(long, long, long)
CUDA_ON_CPU_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_ON_CPU_MIN_MAX(unsigned long, long, unsigned long)
CUDA_ON_CPU_MIN_MAX(unsigned long, unsigned long, long)
CUDA_ON_CPU_MIN_MAX(long long, long long, long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline int __vimin3_s32(int a, int b, int c) { return min(min(a, b), c); }
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline unsigned __vimin3_u32(unsigned a, unsigned b, unsigned c) { return min(min(a, b), c); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return max(max(a, b), c); }

// Two 16-bit integers in a word.
#define CUDA_ON_CPU_HALVES(name, type, value)                                                        \
  inline unsigned name(unsigned a, unsigned b) {                                                     \
    return cuda_on_cpu::halves<type>(a, b, [](type x, type y) { return static_cast<type>(value); }); \
  }
CUDA_ON_CPU_HALVES(__vmaxu2, uint16_t, x < y ? y : x)
CUDA_ON_CPU_HALVES(__vminu2, uint16_t, x < y ? x : y)
CUDA_ON_CPU_HALVES(__vmaxs2, int16_t, x < y ? y : x)
CUDA_ON_CPU_HALVES(__vmins2, int16_t, x < y ? x : y)
CUDA_ON_CPU_HALVES(__vadd2, uint16_t, x + y)
CUDA_ON_CPU_HALVES(__vsub2, uint16_t, x - y)
CUDA_ON_CPU_HALVES(__vcmpeq2, uint16_t, x == y ? 0xFFFF : 0)
CUDA_ON_CPU_HALVES(__vcmpgtu2, uint16_t, x > y ? 0xFFFF : 0)
#undef CUDA_ON_CPU_HALVES
inline unsigned __vimax3_u16x2(unsigned a, unsigned b, unsigned c) { return __vmaxu2(__vmaxu2(a, b), c); }
inline unsigned __vimin3_u16x2(unsigned a, unsigned b, unsigned c) { return __vminu2(__vminu2(a, b), c); }
inline unsigned __vimax3_s16x2(unsigned a, unsigned b, unsigned c) { return __vmaxs2(__vmaxs2(a, b), c); }
inline unsigned __vimin3_s16x2(unsigned a, unsigned b, unsigned c) { return __vmins2(__vmins2(a, b), c); }
inline unsigned __viaddmax_s16x2(unsigned a, unsigned b, unsigned c) { return __vmaxs2(__vadd2(a, b), c); }

// --- accesses with a hint for the caches, which are not modelled

#define CUDA_ON_CPU_LOAD(name) \
  template <class T>           \
  T name(const T* from) {      \
    return *from;              \
  }
#define CUDA_ON_CPU_STORE(name)                   \
  template <class T>                              \
  void name(T* to, std::common_type_t<T> value) { \
    *to = value;                                  \
  }
CUDA_ON_CPU_LOAD(__ldg)
CUDA_ON_CPU_LOAD(__ldcs)
CUDA_ON_CPU_LOAD(__ldcg)
CUDA_ON_CPU_LOAD(__ldca)
CUDA_ON_CPU_LOAD(__ldlu)
CUDA_ON_CPU_STORE(__stcs)
CUDA_ON_CPU_STORE(__stcg)
CUDA_ON_CPU_STORE(__stwb)
CUDA_ON_CPU_STORE(__stwt)
#undef CUDA_ON_CPU_LOAD
#undef CUDA_ON_CPU_STORE
