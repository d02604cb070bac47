// Eight elements beside what their codes decode to: a thread's counts and sums, and the block's histogram of codes.
#pragma once

#include "../dequantize.cuh"
#include "elements.cuh"

namespace jaxlowprec {
namespace cuda {

/// Sums of a few elements, in float32.
struct TileSums {
  float error, magnitude, square_error, energy;
};

/// The sums of every thread of a block, in shared memory: registers are few.
template <int kThreads>
struct ThreadSums {
  static constexpr int kNumbers = 4;
  double numbers[kNumbers][kThreads];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i][threadIdx.x] = 0;
  }
  __device__ __forceinline__ void add(const TileSums& sums) {
    const float tile[kNumbers] = {sums.error, sums.magnitude, sums.square_error, sums.energy};
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i][threadIdx.x] += tile[i];
  }
};

/// A thread's counts but those of elements, which are as many as codes. None reaches 2^32: that would be more than 2^40
/// elements in a block's hands.
struct Counts {
  uint32_t zeros, underflow, saturation, nonfinite, poisoned;
};

/// A histogram in shared memory: every lane has a bank of its own, which the block's warps add to by turns.
struct CodeBins {
  uint32_t counts[kSumsCodes][32];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kSumsCodes * 32; i += blockDim.x) counts[i / 32][i % 32] = 0;
  }
  __device__ __forceinline__ void add(uint32_t bin) { atomicAdd(&counts[bin][threadIdx.x % 32], 1u); }
  __device__ __forceinline__ uint64_t count(int bin) const {
    uint64_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += counts[bin][(i + bin) % 32];
    return sum;
  }
};

/// Eight codes and what makes numbers of them.
struct Decoded {
  const uint32_t (&codes)[2];
  float scale;
  bool two_level;
  float amax;  // of two-level formats
};

/// The first `count` of eight elements; the others are zeros. Whether one of them is finite and not zero.
template <class Element>
JLP_DEVICE bool count_eight_of(const float (&x)[8], const Decoded& decoded, int count, float unit, CodeBins& bins,
                               Counts& counts, TileSums& sums) {
  EightCodes<Element> codes;
#pragma unroll
  for (int i = 0; i < EightCodes<Element>::kWords; ++i) codes.words[i] = decoded.codes[i];
  float d[8];
  codes.decode(d);
  if constexpr (Element::kPacked) {
    if (decoded.two_level)
      apply_scale<Decoding::kTwoLevel>(d, decoded.scale, decoded.amax);
    else
      apply_scale<Decoding::kProduct>(d, decoded.scale, 0.0f);
  } else {
    apply_scale<Decoding::kProduct>(d, decoded.scale, 0.0f);
  }
  bool some = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = Element::kPacked ? codes.words[0] >> (4 * i) & 0xFu : decoded.codes[i / 4] >> (i % 4 * 8) & 0xFFu;
    const uint32_t magnitude_code = code & (Element::kPacked ? 7u : 0x7Fu);
    const uint32_t bits = magnitude(x[i]), size = bits < kMinNormalBits ? 0u : bits;
    const uint32_t size_decoded = i < count ? magnitude(d[i]) : 0u;  // a poisoned block's padding is no element
    const bool finite = size < kInfinityBits, decodes = size_decoded < kInfinityBits, known = finite && decodes;
    const float kept = known ? x[i] * unit : 0.0f, off = known && i < count ? d[i] * unit - kept : 0.0f;
    counts.zeros += size == 0;
    counts.underflow += size != 0 && size_decoded == 0;
    counts.saturation += known && size_decoded != 0 && size > size_decoded && magnitude_code == Element::kLargestCode;
    counts.nonfinite += !finite;
    counts.poisoned += finite && !decodes;
    sums.error += off, sums.magnitude += absolute(kept);
    sums.square_error += off * off, sums.energy += kept * kept;
    some |= finite && size != 0;
    if (i < count) bins.add(Element::kPacked ? code : magnitude_code >> Element::kMantissaBits);
  }
  counts.zeros -= 8 - count;
  return some;
}

JLP_DEVICE bool count_eight(CodeType code, const float (&x)[8], const Decoded& decoded, int count, float unit,
                            CodeBins& bins, Counts& counts, TileSums& sums) {
#define JLP_CASE(Type) \
  case CodeType::k##Type: return count_eight_of<Type>(x, decoded, count, unit, bins, counts, sums);
  switch (code) {
    JLP_CASE(E2M1)
    JLP_FLOAT8_TYPES(JLP_CASE)
    default: return false;  // launches admit no other code
  }
#undef JLP_CASE
}

}  // namespace cuda
}  // namespace jaxlowprec
