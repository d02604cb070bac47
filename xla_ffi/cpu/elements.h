// Input and output element types. A Pair holds 2 * kLanes consecutive elements split into those at even and at odd places:
// for 16-bit types that is how a 32-bit word falls apart, and two 4-bit codes of a byte meet again in one lane.
#pragma once

#include "../numerics/float16.h"
#include "../problems.h"
#include "vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

struct Pair {
  F32 even, odd;
};

/// Lane b: the largest of the 8 consecutive lanes b * 8 ... of the eight vectors, by three pairwise foldings.
template <class Max>
JLP_RULE U32 fold_eight(U32 (&m)[8], Max max) {
  JLP_UNROLL(3)
  for (int n = 4; n >= 1; n /= 2) {
    JLP_UNROLL(4)
    for (int j = 0; j < n; ++j) m[j] = pairwise_max(m[2 * j], m[2 * j + 1], max);
  }
  return m[0];
}

/// Lane b: the largest magnitude, as element bits, of the b-th 16 of 16 * kLanes 16-bit elements.
JLP_RULE U32 block_magnitudes16(const uint16_t* p) {
  U32 m[8];
  JLP_UNROLL(8)
  for (int j = 0; j < 8; ++j) m[j] = load<U32>(p + 2 * kLanes * j) & 0x7FFF7FFFu;
  const U32 halves = fold_eight(m, [](U32 a, U32 b) { return max_halves(a, b); });
  return max_magnitude(halves & 0xFFFFu, halves >> 16);
}

/// The largest magnitudes of 16 * kLanes 16-bit elements, a lane's share in each.
JLP_RULE U32 packet_magnitudes16(const uint16_t* p) {
  U32 most = U32{};
  JLP_UNROLL(8)
  for (int j = 0; j < 8; ++j) most = max_halves(most, load<U32>(p + 2 * kLanes * j) & 0x7FFF7FFFu);
  return max_magnitude(most & 0xFFFFu, most >> 16);
}

/// The largest magnitudes, as element bits, of 2 * kLanes columns of 16-bit elements, two columns per lane.
JLP_RULE U32 column_magnitudes16(const uint16_t* p, int rows, int stride) {
  U32 even = U32{}, odd = U32{};  // rows: one chain of maxima would take a step's latency a row
  for (int r = 0; r < rows; r += 2) {
    even = max_halves(even, load<U32>(p + r * stride) & 0x7FFF7FFFu);
    odd = max_halves(odd, load<U32>(p + (r + 1) * stride) & 0x7FFF7FFFu);
  }
  return max_halves(even, odd);
}

/// Stores what was split into even and odd elements in order.
template <class V>
JLP_RULE void store_interleaved(void* p, V even, V odd) {
  store(static_cast<uint8_t*>(p), shuffle<InterleaveLow>(even, odd));
  store(static_cast<uint8_t*>(p) + JLP_VECTOR_BYTES, shuffle<InterleaveHigh>(even, odd));
}

struct BF16 {
  using Storage = uint16_t;

  /// Lane b: the float32 magnitude bits of the largest of the b-th 16 elements.
  JLP_RULE U32 block_amax(const uint16_t* p) { return block_magnitudes16(p) << 16; }
  /// The largest of all lanes' elements, in some lanes.
  JLP_RULE U32 packet_amax(const uint16_t* p) { return packet_magnitudes16(p) << 16; }
  /// The float32 magnitude bits of the largest of each of 2 * kLanes columns, `rows` (even) of them `stride` elements apart.
  JLP_RULE void column_amax(const uint16_t* p, int rows, int stride, uint32_t* amax) {
    const U32 most = column_magnitudes16(p, rows, stride);
    store_interleaved(amax, most << 16, most & 0xFFFF0000u);
  }

  JLP_RULE F32 load_lanes(const uint16_t* p) { return bf16_decode<F32>(load_u16(p)); }
  JLP_RULE void store_lanes(uint16_t* p, F32 v) { store_u16(p, bf16_encode(v)); }

  JLP_RULE Pair load_pair(const uint16_t* p) {
    const U32 words = load<U32>(p);
    return {L::from_bits(words << 16), L::from_bits(words & 0xFFFF0000u)};
  }
  JLP_RULE void store_pair(uint16_t* p, Pair v) { store(p, bf16_encode(v.even) | (bf16_encode(v.odd) << 16)); }
  /// The same where neither is NaN.
  JLP_RULE void store_numbers(uint16_t* p, Pair v) {
    store(p, (rounded_bits(v.even) >> 16) | (rounded_bits(v.odd) & 0xFFFF0000u));
  }
  /// x rounded to the element type, as float32.
  JLP_RULE F32 round(F32 x) { return bf16_decode<F32>(bf16_encode(x)); }
  /// The same for a finite x.
  JLP_RULE F32 round_finite(F32 x) { return L::from_bits(rounded_bits(x) & 0xFFFF0000u); }

 private:
  JLP_RULE U32 rounded_bits(F32 x) {
    const U32 u = L::bits(x);
    return u + 0x7FFFu + ((u >> 16) & 1u);
  }
};

struct F16 {
  using Storage = uint16_t;

  JLP_RULE U32 block_amax(const uint16_t* p) { return L::bits(f16_decode<F32>(block_magnitudes16(p))); }
  JLP_RULE U32 packet_amax(const uint16_t* p) { return L::bits(f16_decode<F32>(packet_magnitudes16(p))); }
  JLP_RULE void column_amax(const uint16_t* p, int rows, int stride, uint32_t* amax) {
    const U32 most = column_magnitudes16(p, rows, stride);
    store_interleaved(amax, L::bits(f16_decode<F32>(most & 0xFFFFu)), L::bits(f16_decode<F32>(most >> 16)));
  }

  JLP_RULE F32 load_lanes(const uint16_t* p) { return f16_decode<F32>(load_u16(p)); }
  JLP_RULE void store_lanes(uint16_t* p, F32 v) { store_u16(p, f16_encode(v)); }

  JLP_RULE Pair load_pair(const uint16_t* p) {
    const U32 words = load<U32>(p);
    return {f16_decode<F32>(words & 0xFFFFu), f16_decode<F32>(words >> 16)};
  }
  JLP_RULE void store_pair(uint16_t* p, Pair v) { store(p, f16_encode(v.even) | (f16_encode(v.odd) << 16)); }
  JLP_RULE void store_numbers(uint16_t* p, Pair v) { store_pair(p, v); }
  JLP_RULE F32 round(F32 x) { return f16_decode<F32>(f16_encode(x)); }
  JLP_RULE F32 round_finite(F32 x) { return round(x); }
};

struct Float {
  using Storage = float;

  JLP_RULE Pair load_pair(const float* p) {
    const F32 low = load<F32>(p), high = load<F32>(p + kLanes);
    return {shuffle<EvenLanes>(low, high), shuffle<OddLanes>(low, high)};
  }
  JLP_RULE U32 block_amax(const float* p) {
    U32 m[8];
    JLP_UNROLL(8)
    for (int j = 0; j < 8; ++j) {  // up to 8 lanes two whole vectors meet in one block; beyond, only neighbours do
      const float* at = p + 2 * kLanes * j;
      const Pair pair = kLanes > 8 ? load_pair(at) : Pair{load<F32>(at), load<F32>(at + kLanes)};
      m[j] = max_magnitude(magnitude(pair.even), magnitude(pair.odd));
    }
    return fold_eight(m, [](U32 a, U32 b) { return max_magnitude(a, b); });
  }
  JLP_RULE U32 packet_amax(const float* p) {
    U32 most = U32{};
    JLP_UNROLL(16)
    for (int j = 0; j < 16; ++j) most = max_magnitude(most, magnitude(load<F32>(p + kLanes * j)));
    return most;
  }
  JLP_RULE void column_amax(const float* p, int rows, int stride, uint32_t* amax) {
    U32 low = U32{}, high = U32{};
    for (int r = 0; r < rows; ++r) {
      low = max_magnitude(low, magnitude(load<F32>(p + r * stride)));
      high = max_magnitude(high, magnitude(load<F32>(p + r * stride + kLanes)));
    }
    store(amax, low), store(amax + kLanes, high);
  }
  JLP_RULE F32 load_lanes(const float* p) { return load<F32>(p); }
  JLP_RULE void store_lanes(float* p, F32 v) { store(p, v); }
  JLP_RULE void store_pair(float* p, Pair v) { store_interleaved(p, v.even, v.odd); }
  JLP_RULE void store_numbers(float* p, Pair v) { store_pair(p, v); }
  JLP_RULE F32 round(F32 x) { return x; }
  JLP_RULE F32 round_finite(F32 x) { return x; }
};

/// Calls visit with the element type's traits.
template <class Visit>
auto with_element(ElementType type, Visit visit) {
  switch (type) {
    case ElementType::kBF16: return visit(BF16{});
    case ElementType::kF16: return visit(F16{});
    default: return visit(Float{});
  }
}

// --- elements of a type known at run time: `count` of them, up to kLanes; lanes beyond are zero and not written

JLP_RULE F32 load_elements(const void* p, ElementType type, int64_t index, int count) {
  alignas(64) uint8_t padded[4 * kLanes];
  const uint8_t* at = static_cast<const uint8_t*>(p) + index * element_bytes(type);
  if (count < kLanes) {
    memset(padded, 0, sizeof padded);
    memcpy(padded, at, count * element_bytes(type));
    at = padded;
  }
  if (type == ElementType::kF32) return load<F32>(at);
  const U32 halves = load_u16(at);
  return type == ElementType::kBF16 ? bf16_decode<F32>(halves) : f16_decode<F32>(halves);
}

JLP_RULE void store_elements(void* p, ElementType type, int64_t index, int count, F32 v) {
  uint8_t* at = static_cast<uint8_t*>(p) + index * element_bytes(type);
  alignas(64) uint8_t padded[4 * kLanes];
  uint8_t* to = count < kLanes ? padded : at;
  if (type == ElementType::kF32) {
    store(to, v);
  } else {
    store_u16(to, type == ElementType::kBF16 ? bf16_encode(v) : f16_encode(v));
  }
  if (count < kLanes) memcpy(at, padded, count * element_bytes(type));
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
