// What the kernels use of the machine beyond plain CUDA C++: conversions, copies and tensor cores that need PTX. Each has a
// definition for the host too, by the rules of numerics/ or by tests/cuda, so that kernels run on a CPU in the tests.
//
// kArch is the architecture compiled for (900 for sm_90): a test chooses it, and executes what that architecture would. It
// is for bodies of functions only: a kernel's template arguments must not depend on it, since the host's stub would differ.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../numerics/e2m1.h"
#include "../numerics/float16.h"
#include "../numerics/float8.h"

#define JLP_DEVICE static __device__ __forceinline__

namespace jaxlowprec {
namespace cuda {

#if defined(__CUDA_ARCH__)
constexpr int kArch = __CUDA_ARCH__;
#elif defined(JLP_TEST_CUDA_ARCH)
constexpr int kArch = JLP_TEST_CUDA_ARCH;
#else
constexpr int kArch = 0;  // the host pass of nvcc
#endif
/// Whether the hardware converts to and from a type of 8-bit codes.
template <class Code>
constexpr bool kHasFloat8Conversion = kArch >= 890 && (std::is_same_v<Code, E4M3> || std::is_same_v<Code, E5M2>);
// Machine code for the families of sm_100f and sm_120f has it; that for sm_100, and portable code, has not.
#if defined(JLP_TEST_CUDA_ARCH)
constexpr bool kHasE2M1Conversion = kArch >= 1000;
#elif defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000  // sm_90a is a family too
#define JLP_HAS_E2M1_CONVERSION
constexpr bool kHasE2M1Conversion = true;
#else
constexpr bool kHasE2M1Conversion = false;
#endif

// --- conversions. Two at a time, the first in the low half

#if defined(__CUDACC__)

JLP_DEVICE uint32_t bf16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
JLP_DEVICE uint32_t f16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
JLP_DEVICE float f16_to_float(uint32_t half) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<uint16_t>(half)));
  return y;
}

/// The sign bits of two numbers where they are negative, none where they are zero of either sign; the other bits are
/// arbitrary. A subnormal bfloat16 is zero: adding the largest of them leaves a minus to normal numbers alone.
JLP_DEVICE uint32_t negative_bf16x2(uint32_t x) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3F803F80u), "r"(0x007F007Fu));
  return y;
}
JLP_DEVICE uint32_t negative_f16x2(uint32_t x) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3C003C00u), "r"(0u));
  return y;
}

// The hardware's saturating conversions, where kHas... says so. A NaN stays one; zero keeps its sign.
template <class Code>
JLP_DEVICE uint32_t float8x2_hardware(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t y;
  if constexpr (std::is_same_v<Code, E4M3>)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
#else
  return 0;
#endif
}
JLP_DEVICE uint32_t e2m1x2_hardware(float low, float high) {
#if defined(JLP_HAS_E2M1_CONVERSION)
  uint32_t y;
  asm("{ .reg .b8 byte; cvt.rn.satfinite.e2m1x2.f32 byte, %1, %2; cvt.u32.u8 %0, byte; }" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return 0;
#endif
}

/// Two 8-bit codes as float16, exactly; NaN stays one. Where kHasFloat8Conversion says so.
template <class Code>
JLP_DEVICE uint32_t f16x2_of_float8x2_hardware(uint32_t two) {
#if __CUDA_ARCH__ >= 890
  uint32_t y;
  static_assert(std::is_same_v<Code, E4M3>, "E5M2 needs no conversion: it is float16's upper byte");
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<uint16_t>(two)));
  return y;
#else
  return 0;
#endif
}

/// (x & mask) | bits in one instruction: with two constants the compiler takes two.
JLP_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

/// (x & mask) ^ bits, likewise.
JLP_DEVICE uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

/// 1 / x for a normal x, to within one unit in the last place.
JLP_DEVICE float near_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / sqrt(x) for a normal x, to within two units in the last place.
JLP_DEVICE float near_inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The same number, which the compiler then keeps instead of computing it again wherever it is used.
JLP_DEVICE uint32_t kept(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}

/// The same number; what is computed from it, the compiler then computes anew wherever it is used, instead of keeping it.
JLP_DEVICE uint32_t not_kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// --- asynchronous copies of 16 bytes to shared memory, in groups

JLP_DEVICE void copy_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
/// The same where they are `there`; else 16 zeros, and nothing is read.
JLP_DEVICE void copy_async16_or_zeros(void* shared, const void* global, bool there) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(there ? 16 : 0)
      : "memory");
}
/// 16 bytes that no thread writes, of an array that is read along its lines: the L2 cache takes 256 from memory.
JLP_DEVICE uint4 load_line16(const void* global) {
  uint4 v;
  asm("ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global));
  return v;
}
JLP_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kPending of the calling thread's groups are unfinished. Other threads' copies need a barrier too.
template <int kPending>
JLP_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- tensor cores

/// d += a b for a 16x16 (row-major), b 16x8 (column-major) of bfloat16 and d of float32, in the fragments of mma.m16n8k16.
JLP_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// d = a b + c for a 16x32 (row-major), b 32x8 (column-major) of 8-bit integers and d of 32-bit ones, in the fragments of
/// mma.m16n8k32.
JLP_DEVICE void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int32_t (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
JLP_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared_row)))
               : "memory");
}

/// a * b for each of two bfloat16, rounded. Subnormal bfloat16 are ordinary numbers here, whatever -ftz says.
JLP_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t y;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0
#endif
  return y;
}
/// a * b + c for each of two bfloat16, rounded once. Subnormals as above.
JLP_DEVICE uint32_t multiply_add_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

#else  // executed on a CPU by tests/cuda

JLP_DEVICE uint32_t bf16x2(float low, float high) { return bf16_encode(low) | bf16_encode(high) << 16; }
JLP_DEVICE uint32_t f16x2(float low, float high) { return f16_encode(low) | f16_encode(high) << 16; }
JLP_DEVICE float f16_to_float(uint32_t half) { return f16_decode<float>(half & 0xFFFFu); }

JLP_DEVICE uint32_t negative_x2(uint32_t x, uint32_t least) {
  const auto bit = [&](int shift) { return ((x >> shift) & 0x7FFFu) >= least ? x & (0x8000u << shift) : 0u; };
  return bit(0) | bit(16);
}
JLP_DEVICE uint32_t negative_bf16x2(uint32_t x) { return negative_x2(x, 0x80); }
JLP_DEVICE uint32_t negative_f16x2(uint32_t x) { return negative_x2(x, 1); }

template <class Code>
JLP_DEVICE uint32_t float8x2_hardware(float low, float high) {
  const auto code = [](float x) {  // infinity saturates, too
    return float8_encode<Code>(absolute(x) > Code::kMax ? std::copysign(Code::kMax, x) : x);
  };
  return code(low) | code(high) << 8;
}
JLP_DEVICE uint32_t e2m1x2_hardware(float low, float high) { return e2m1_encode(low) | e2m1_encode(high) << 4; }
template <class Code>
JLP_DEVICE uint32_t f16x2_of_float8x2_hardware(uint32_t two) {
  const auto half = [](uint32_t code) { return f16_encode(float8_decode<Code, float>(code & 0xFFu)); };
  return half(two) | half(two >> 8) << 16;
}

JLP_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
JLP_DEVICE uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) ^ bits; }
/// One unit off, up or down: callers have to be right with either.
JLP_DEVICE float near_reciprocal(float x) {
  const uint32_t bits = Lanes<float>::bits(1.0f / x);
  return Lanes<float>::from_bits(bits + (bits & 2u) - 1u);
}

/// Rounded to nearest: roots that a remainder corrects are right with the hardware's, but not with every other.
JLP_DEVICE float near_inverse_root(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }

JLP_DEVICE uint32_t kept(uint32_t x) { return x; }
JLP_DEVICE uint32_t not_kept(uint32_t x) { return x; }

JLP_DEVICE void copy_async16(void* shared, const void* global) { cuda_on_cpu::copy_async(shared, global, 16); }
JLP_DEVICE void copy_async16_or_zeros(void* shared, const void* global, bool there) {
  there ? cuda_on_cpu::copy_async(shared, global, 16) : cuda_on_cpu::zero_async(shared, 16);
}
JLP_DEVICE uint4 load_line16(const void* global) { return *static_cast<const uint4*>(global); }
JLP_DEVICE void copy_async_commit() { cuda_on_cpu::copy_async_commit(); }
template <int kPending>
JLP_DEVICE void copy_async_wait() {
  cuda_on_cpu::copy_async_wait(kPending);
}

JLP_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  cuda_on_cpu::mma_m16n8k16_bf16(d, a, b);
}
JLP_DEVICE void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int32_t (&c)[4]) {
  cuda_on_cpu::mma_m16n8k32_s8(d, a, b, c);
}
JLP_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) { cuda_on_cpu::ldmatrix_x4(r, shared_row); }

/// The number of a bfloat16, subnormals included, which float32 would lose with flushing on.
JLP_DEVICE double bf16_exact(uint32_t half) {
  const int exponent = static_cast<int>((half >> 7) & 0xFFu), mantissa = static_cast<int>(half & 0x7Fu);
  if (exponent == 255) return bf16_decode<float>(half & 0xFFFFu);
  const double magnitude = std::ldexp(exponent ? mantissa + 128 : mantissa, (exponent ? exponent : 1) - 134);
  return half & 0x8000u ? -magnitude : magnitude;
}
/// Products of two bfloat16 are exact in double and in float32; a sum that is neither is rounded more than once.
JLP_DEVICE uint32_t bf16_rounded(double x) {
  if (!(std::fabs(x) < 1.1754943508222875e-38)) return bf16_encode(static_cast<float>(x));
  return static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(x), 133))) | (std::signbit(x) ? 0x8000u : 0u);
}
JLP_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const auto product = [&](int shift) { return bf16_rounded(bf16_exact(a >> shift) * bf16_exact(b >> shift)); };
  return product(0) | product(16) << 16;
}
JLP_DEVICE uint32_t multiply_add_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto sum = [&](int shift) {
    return bf16_rounded(std::fma(bf16_exact(a >> shift), bf16_exact(b >> shift), bf16_exact(c >> shift)));
  };
  return sum(0) | sum(16) << 16;
}

#endif

/// The block's dynamic shared memory as the kernel's one struct; a launch passes sizeof(Shared).
template <class Shared>
JLP_DEVICE Shared& block_shared() {
#if defined(__CUDACC__)
  extern __shared__ uint4 memory[];
  return *reinterpret_cast<Shared*>(memory);
#else
  return *static_cast<Shared*>(cuda_on_cpu::shared_memory());
#endif
}

}  // namespace cuda
}  // namespace jaxlowprec
