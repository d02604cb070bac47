// Scales and zero points of Int4 groups, kLanes of them at once, and what single groups are made of.
#pragma once

#include "int4_elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Groups side by side: kCount of them, from the extremes of each.
template <int kCount>
struct Int4Groups {
  alignas(64) float scale[kCount], inverse[kCount], most[kCount];
  alignas(64) uint32_t zero[kCount];
  bool finite = true;

  /// Groups i to i + kLanes by their extremes as float32 bits, not rounded yet.
  template <class E, class Deploy, bool kSymmetric>
  inline __attribute__((always_inline)) void compute(int i, U32 positive, U32 negative) {
    const U32 high = rounded<E, Deploy>(positive);
    Int4Group<F32> group;
    if constexpr (kSymmetric)
      group = int4_symmetric<F32, Deploy>(high);
    else
      group = int4_asymmetric<F32, Deploy>(high, rounded<E, Deploy>(negative));
    store(scale + i, group.scale), store(inverse + i, group.inverse), store(most + i, group.most);
    store(zero + i, group.zero);
    finite &= all_below(group.scale, __builtin_inff());
  }

  /// One group, in all lanes.
  inline __attribute__((always_inline)) Int4Group<F32> splat(int i) const {
    return {L::splat(scale[i]), L::splat(inverse[i]), U32{} + zero[i], L::splat(most[i])};
  }
  /// kLanes groups.
  inline __attribute__((always_inline)) Int4Group<F32> lanes(int i) const {
    return {load<F32>(scale + i), load<F32>(inverse + i), load<U32>(zero + i), load<F32>(most + i)};
  }

  /// As stored.
  template <class Deploy>
  inline __attribute__((always_inline)) void scale_bits(uint16_t (&bits)[kCount]) const {
    for (int i = 0; i < kCount; i += kLanes) store_u16(bits + i, int4_scale_bits<F32, Deploy>(load<F32>(scale + i)));
  }

 private:
  /// A magnitude's bits rounded to the deployment dtype; those of NaN and infinity are kept.
  template <class E, class Deploy>
  JLP_RULE U32 rounded(U32 bits) {
    const U32 near = L::bits(deployed<E, Deploy>(L::from_bits(bits)));
    return bits >= kInfinityBits ? bits : near;
  }
};

/// A number of the deployment dtype as an element of the result, which is of that type or float32.
template <class E, class Deploy>
JLP_RULE void store_two_steps(typename E::Storage* to, F32 a, F32 b, const Int4Group<F32>& ga, const Int4Group<F32>& gb) {
  const F32 first = (a - kInt4Integers) * ga.scale, second = (b - kInt4Integers) * gb.scale;
  if constexpr (std::is_same_v<E, Float>)
    Int4Elements<E>::store_two(to, Deploy::round(first), Deploy::round(second));
  else
    Int4Elements<E>::store_two(to, Deploy::template finite_bits<F32>(first), Deploy::template finite_bits<F32>(second));
}

template <class E>
constexpr uint32_t kElementNaN = std::is_same_v<E, Float>  ? kNaNBits
                                 : std::is_same_v<E, BF16> ? Int4BF16::kNaN
                                                           : Int4F16::kNaN;

/// Writes `count` NaNs, `stride` elements apart.
template <class E>
__attribute__((noinline)) void write_nan(typename E::Storage* to, int64_t count, int64_t stride) {
  const uint32_t bits = kElementNaN<E>;  // little-endian
  for (int64_t i = 0; i < count; ++i) memcpy(to + i * stride, &bits, sizeof *to);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
