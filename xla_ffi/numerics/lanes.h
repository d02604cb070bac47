// Lanes<F>: what the numeric rules need from a value of type F.
//
// Every rule in this folder is a branch-free template over F, so that one definition serves the scalar tests, device code
// (F = float under nvcc) and the CPU kernels (F = a vector of floats, specialised in cpu/vec.h). No rule relies on the
// compiler's floating-point freedom: build with -ffp-contract=off (host) and --fmad=false (device).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JLP_RULE static __host__ __device__ __forceinline__
#define JLP_UNROLL(n) JLP_PRAGMA(unroll n)
#else
#define JLP_RULE static inline __attribute__((always_inline))
#define JLP_UNROLL(n) JLP_PRAGMA(GCC unroll n)
#endif
#define JLP_PRAGMA(text) _Pragma(#text)

namespace jaxlowprec {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kMagnitudeBits = 0x7FFFFFFFu;
constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNaNBits = 0x7FC00000u;        // the quiet NaN every engine stores
constexpr uint32_t kMinNormalBits = 0x00800000u;  // 2^-126: below it a float32 counts as zero (numerics.md, Notation)
constexpr float kMaxFinite = 3.40282346638528859812e38f;

template <class F>
struct Lanes;

template <>
struct Lanes<float> {
  using Uint = uint32_t;

  JLP_RULE uint32_t bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
  }
  JLP_RULE float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
  }
  JLP_RULE float splat(float x) { return x; }
  JLP_RULE float min(float a, float b) { return a < b ? a : b; }  // b when either is NaN
  JLP_RULE float max(float a, float b) { return a > b ? a : b; }
  JLP_RULE float round_to_even(float x) {  // |x| < 2^22
    constexpr float kMagic = 12582912.0f;
    return (x + kMagic) - kMagic;
  }
  /// a * b + c where the caller knows a * b to be exact, so that fusing it changes nothing.
  JLP_RULE float multiply_add_exact(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return a * b + c;
#endif
  }
  /// a * b + c, rounded once.
  JLP_RULE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
  JLP_RULE float root(float x) { return sqrtf(x); }  // correctly rounded
  /// x * y, with an x that is zero (of either sign, or subnormal) made +0; a product that underflows keeps its sign.
  JLP_RULE float scaled(float x, float y) { return (flush(x) + 0.0f) * y; }
  JLP_RULE uint32_t truncate(float x) { return static_cast<uint32_t>(static_cast<int32_t>(x)); }  // |x| < 2^31
  JLP_RULE float to_float(uint32_t u) { return static_cast<float>(static_cast<int32_t>(u)); }     // u < 2^31
  JLP_RULE void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
  /// Subnormals become zero of the same sign. The CPU kernels have the hardware do this, see cpu/flush_denormals.h.
  JLP_RULE float flush(float x) {
    const uint32_t u = bits(x);
    return from_bits((u & kMagnitudeBits) < kMinNormalBits ? u & kSignBit : u);
  }
};

template <class F>
using Uint = typename Lanes<F>::Uint;

/// |x| as an unsigned integer: numbers sort by magnitude, infinity above them, NaN above infinity (numerics.md 1).
template <class F>
JLP_RULE Uint<F> magnitude(F x) {
  return Lanes<F>::bits(x) & kMagnitudeBits;
}

template <class F>
JLP_RULE Uint<F> fill(uint32_t u) {
  return Uint<F>{} + u;
}

template <class F>
JLP_RULE F absolute(F x) {
  return Lanes<F>::from_bits(magnitude(x));
}

}  // namespace jaxlowprec
