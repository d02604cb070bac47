// AdamW's and Lion's update of eight elements by a thread, of the numbers that training has; four threads have a block
// of 32.
//
//   gradient, parameter, remainder, codes (16 bytes each, 8 of codes) -> moments and weight in float32 -> the new ones ->
//   largest ranks of the block by two shuffles -> codes, parameter, remainder
//
// Nothing is stored before all lanes of a warp know that their numbers are in range; else each block goes the way of
// update_any.cuh, from memory. Dividends are scaled by powers of two so that remainders are normal numbers, and quotients
// unscaled in the fused multiply-add that rounds the next sum: its product is exact. What is too large for that, or not
// finite, becomes a NaN, which the weight shows. An update that would be subnormal, and so zero, needs a divisor above 1.
#pragma once

#include "exact.cuh"
#include "state_codes.cuh"
#include "update_any.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr float kScaleOfM = 0x1p36f, kScaleOfV = 0x1p60f, kUnscaleOfRoot = 0x1p-30f, kUnscaleOfUpdate = 0x1p-36f;
constexpr float kInPlaceOfZero = 0x1p-120f;  // its root is too little beside epsilon to change the sum

/// The scalars of a matrix, and what follows from them.
template <class Rule>
struct UpdateStepper;

template <>
struct UpdateStepper<AdamW> {
  AdamW::Scalars s;
  Divisor k1, k2;
  uint32_t large_v;  // the upper half of a v that makes the divisor of updates as large as 1
  bool in_range;

  JLP_DEVICE UpdateStepper of(const float* from) {
    UpdateStepper stepper;
    memcpy(&stepper.s, from, sizeof stepper.s);
    const AdamW::Scalars& s = stepper.s;
    stepper.k1 = divisor_of(s.k1), stepper.k2 = divisor_of(s.k2);
    stepper.in_range =
        s.k1 >= 0x1p-13f && s.k1 <= 1.0f && s.k2 >= 0x1p-20f && s.k2 <= 1.0f && s.epsilon >= 0x1p-50f && s.epsilon <= 0.5f;
    stepper.large_v = (Lanes<float>::bits(s.k2) >> 16) - 0x120u;  // of k2 / 4, and two ranks for its rounding
    return stepper;
  }

  /// update_step.
  __device__ __forceinline__ void step(float g, float& m, float& v, float& weight, float& update) const {
    m = g * s.c1 + m * s.b1;
    v = (g * g) * s.c2 + v * s.b2;
    const float divisor = __fmaf_rn(root(quotient(__fmaf_rn(v, kScaleOfV, kInPlaceOfZero), k2)), kUnscaleOfRoot, s.epsilon);
    const float scaled = Lanes<float>::from_bits(kept(Lanes<float>::bits(m * kScaleOfM)));  // or -m is scaled as well
    const float u = quotient(quotient(scaled, k1), divisor);
    update = __fmaf_rn(u, kUnscaleOfUpdate, weight * s.weight_decay) * s.minus_rate;
    weight = weight + update;
  }
};

template <>
struct UpdateStepper<Lion> {
  Lion::Scalars s;
  static constexpr bool in_range = true;

  JLP_DEVICE UpdateStepper of(const float* from) {
    UpdateStepper stepper;
    memcpy(&stepper.s, from, sizeof stepper.s);
    return stepper;
  }

  /// update_step.
  __device__ __forceinline__ void step(float g, float& m, float& v, float& weight, float& update) const {
    const UpdateStep<float> step = update_step<Lion>(g, m, v, weight, s);
    m = step.m, update = step.update;
    weight = weight + update;
  }
};

/// Words of an array of eights, of which eight elements have so many.
template <int kWords>
JLP_DEVICE void load_eight(const void* from, uint32_t eight, uint32_t (&words)[kWords]) {
  const uint8_t* at = static_cast<const uint8_t*>(from) + uint64_t{eight} * (4 * kWords);
  if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = reinterpret_cast<const uint4*>(at)[i / 4];
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  }
}
template <int kWords>
JLP_DEVICE void store_eight_words(void* to, uint32_t eight, const uint32_t (&words)[kWords]) {
  uint8_t* at = static_cast<uint8_t*>(to) + uint64_t{eight} * (4 * kWords);
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(at) = {words[0], words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4)
      reinterpret_cast<uint4*>(at)[i / 4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
  }
}

/// Eight weights as they are stored.
template <WeightKind kWeight>
struct WeightEight {
  static constexpr int kRestWords = kWeight == WeightKind::kRest16 ? 4 : 2;
  uint32_t parameter[kWeight == WeightKind::kFloat32 ? 8 : 4], rest[kRestWords];
  static constexpr bool kHasRest = kWeight == WeightKind::kRest16 || kWeight == WeightKind::kRest8;

  JLP_DEVICE WeightEight load(const OptimizerUpdateProblem& p, uint32_t eight) {
    WeightEight weight;
    load_eight(p.p, eight, weight.parameter);
    if constexpr (kHasRest) load_eight(p.rest, eight, weight.rest);
    return weight;
  }

  __device__ __forceinline__ void join(float (&x)[8]) const {
    if constexpr (!kHasRest) {
      constexpr ElementType kType = kWeight == WeightKind::kFloat32 ? ElementType::kF32 : ElementType::kBF16;
#pragma unroll
      for (int i = 0; i < 8; i += kPerWord<kType>) widen<kType>(parameter[i / kPerWord<kType>], x + i);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t bits;
        if constexpr (kWeight == WeightKind::kRest16)
          bits = __byte_perm(rest[i / 2] ^ 0x80008000u, parameter[i / 2], i % 2 ? 0x7632 : 0x5410);
        else
          bits = __byte_perm(rest[i / 4] ^ 0x80808080u, parameter[i / 2],
                             (i % 2 ? 0x7600u : 0x5400u) | static_cast<uint32_t>(i % 4 * 0x10)) &
                 0xFFFFFF00u;
        x[i] = Lanes<float>::from_bits(bits - 0x8000u);
      }
    }
  }

  /// Finite weights.
  JLP_DEVICE WeightEight split(const float (&x)[8], const uint32_t (&draws)[4]) {
    WeightEight weight;
    if constexpr (kWeight == WeightKind::kFloat32 || kWeight == WeightKind::kNearest) {
      constexpr ElementType kType = kWeight == WeightKind::kFloat32 ? ElementType::kF32 : ElementType::kBF16;
#pragma unroll
      for (int i = 0; i < 8; i += kPerWord<kType>) weight.parameter[i / kPerWord<kType>] = narrow<kType>(x + i);
    } else {
      uint32_t sum[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t drawn = i % 2 ? draws[i / 2] >> 16 : draws[i / 2] & 0xFFFFu;
        sum[i] = Lanes<float>::bits(x[i]) + (kWeight == WeightKind::kDrawn    ? drawn
                                             : kWeight == WeightKind::kRest16 ? 0x8000u
                                                                              : 0x8080u);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight.parameter[i] = __byte_perm(sum[2 * i], sum[2 * i + 1], 0x7632);
        if constexpr (kWeight == WeightKind::kRest16)
          weight.rest[i] = __byte_perm(sum[2 * i], sum[2 * i + 1], 0x5410) ^ 0x80008000u;
        if (kWeight == WeightKind::kRest8 && i < 2) {
          const uint32_t *four = sum + 4 * i, low = __byte_perm(four[0], four[1], 0x0051);
          weight.rest[i] = __byte_perm(low, __byte_perm(four[2], four[3], 0x0051), 0x5410) ^ 0x80808080u;
        }
      }
    }
    return weight;
  }

  __device__ __forceinline__ void store(const OptimizerUpdateProblem& p, uint32_t eight, const WeightEight& before,
                                        const float (&updates)[8]) const {
    if constexpr (kHasRest) store_eight_words(p.new_rest, eight, rest);
    if (!p.update) return store_eight_words(p.new_p, eight, parameter);
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = Lanes<float>::bits(updates[i]);
    if constexpr (kWeight != WeightKind::kFloat32) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        float now[2], then[2];
        widen<ElementType::kBF16>(parameter[i / 2], now);
        widen<ElementType::kBF16>(before.parameter[i / 2], then);
        words[i] = Lanes<float>::bits(now[0] - then[0]), words[i + 1] = Lanes<float>::bits(now[1] - then[1]);
      }
    }
    store_eight_words(p.update, eight, words);
  }
};

/// Eight numbers of a moment as they are stored, and the exponent of their block.
template <bool kSigned, bool kCoded>
struct MomentEight {
  uint32_t words[kCoded ? 2 : 8], exponent = 0;

  JLP_DEVICE MomentEight load(const MomentState& state, uint32_t eight) {
    MomentEight moment;
    load_eight(kCoded ? static_cast<const void*>(state.codes) : state.numbers, eight, moment.words);
    if constexpr (kCoded) moment.exponent = state.exponents[eight / 4];
    return moment;
  }
  __device__ __forceinline__ bool numbers(float (&x)[8]) const {  // whether they are rare
    if constexpr (kCoded) {
      decode_eight<kSigned>(words, exponent, x);
      return has_rare_codes<kSigned>(words, exponent);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = Lanes<float>::from_bits(words[i]);
      return false;
    }
  }
  __device__ __forceinline__ void store(const MomentState& state, uint32_t eight) const {
    store_eight_words(kCoded ? static_cast<void*>(state.new_codes) : state.new_numbers, eight, words);
    if (kCoded && threadIdx.x % 4 == 0) state.new_exponents[eight / 4] = static_cast<uint8_t>(exponent);
  }
};

/// The upper half of the largest of eight numbers.
JLP_DEVICE uint32_t largest_half(const float (&x)[8]) {
  uint32_t most = 0;
#pragma unroll
  for (const float each : x) most = max(most, Lanes<float>::bits(each));
  return most >> 16;
}

/// Whether a number that is not 0 is below 2^-90.
JLP_DEVICE bool has_tiny(const float (&m)[8]) {
  uint32_t least = 0xFFFFFFFFu;
#pragma unroll
  for (const float each : m) least = min(least, 2 * Lanes<float>::bits(each) - 1);
  return least < 2 * ((127u - 90u) << 23) - 1;
}

/// The draws of an eighth of a row, half-words.
JLP_DEVICE void draw_eighth(const uint32_t (&keys)[20], uint32_t eighth, uint32_t row, uint32_t (&draws)[4]) {
  draws[0] = eighth, draws[1] = row, draws[2] = kDrawnHalves, draws[3] = 0;
#pragma unroll
  for (int round = 0; round < 10; round += 2) {
    const uint4 two = *reinterpret_cast<const uint4*>(keys + 2 * round);
    philox_round<float>(draws, two.x, two.y);
    philox_round<float>(draws, two.z, two.w);
  }
}
/// Halves, which round to nearest.
JLP_DEVICE void halve(uint32_t (&halves)[4]) {
#pragma unroll
  for (uint32_t& each : halves) each = 0x80008000u;
}

/// Eight elements of a lane, updated.
template <class Rule, WeightKind kWeight, ElementType kG, bool kCoded>
struct UpdatedEight {
  WeightEight<kWeight> before, weight;
  MomentEight<true, kCoded> mu;
  MomentEight<false, kCoded> nu;
  float updates[8];
  bool is_rare;  // another way is needed

  JLP_DEVICE UpdatedEight of(const OptimizerUpdateProblem& p, const UpdateShared& shared, const UpdateStepper<Rule>& stepper,
                             uint32_t eight, uint32_t row, uint32_t block) {
    UpdatedEight updated;
    uint32_t g[8 / kPerWord<kG>];
    load_eight(p.g, eight, g);
    updated.before = WeightEight<kWeight>::load(p, eight);
    const auto mu = MomentEight<true, kCoded>::load(p.mu, eight);
    MomentEight<false, kCoded> nu;
    if constexpr (Rule::kHasNu) nu = MomentEight<false, kCoded>::load(p.nu, eight);
    __syncwarp();  // no load comes later: of four lanes that read an exponent, one replaces it

    uint32_t of_m[4] = {}, of_v[4], of_weight[4], at = 0, line = 0;
    if ((kCoded || kWeight == WeightKind::kDrawn) && p.words)
      at = 4 * p.block_numbers[block] + threadIdx.x % 4, line = p.row_numbers[row];
    if constexpr (kCoded) {
      if (p.mu.stochastic || p.nu.stochastic) draw_eighth(shared.keys[0], at, line, of_m);
#pragma unroll
      for (int i = 0; i < 4; ++i) of_v[i] = of_m[i];
      if (!p.nu.stochastic) halve(of_v);
      if (!p.mu.stochastic) halve(of_m);
    }
    if (kWeight == WeightKind::kDrawn) draw_eighth(shared.keys[1], at, line, of_weight);

    float m[8], v[8] = {}, weights[8], products = 0;
    updated.is_rare = mu.numbers(m);
    if constexpr (Rule::kHasNu) updated.is_rare |= nu.numbers(v);
    updated.before.join(weights);
#pragma unroll
    for (int i = 0; i < 8; i += kPerWord<kG>) {
      float gradient[2];
      widen<kG>(g[i / kPerWord<kG>], gradient);
#pragma unroll
      for (int j = i; j < i + kPerWord<kG>; ++j) stepper.step(gradient[j - i], m[j], v[j], weights[j], updated.updates[j]);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      products = __fmaf_rn(weights[i], weights[i + 1], products);
      if constexpr (!Rule::kHasNu) products = __fmaf_rn(m[i], m[i + 1], products);  // the signs of which weights have
    }
    updated.is_rare |= products - products != 0.0f;  // a weight is not finite, or very large
    updated.weight = WeightEight<kWeight>::split(weights, of_weight);

    uint32_t most_v = 0;
    if constexpr (kCoded) {
      const auto ranked_m = RankedEight::of(m, of_m, p.mu.stochastic ? 0x80u : 0u);
      RankedEight ranked_v;
      if constexpr (Rule::kHasNu) ranked_v = RankedEight::of(v, of_v, p.nu.stochastic ? 0x80u : 0u);
      const uint32_t halves_m = ranked_m.template largest<true>();
      uint32_t halves_v = halves_m;
      if constexpr (Rule::kHasNu) halves_v = ranked_v.template largest<false>();
      uint32_t most = __vmaxu2(__byte_perm(halves_m, halves_v, 0x5410), __byte_perm(halves_m, halves_v, 0x7632));
      most = __vmaxu2(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
      most = __vmaxu2(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
      most_v = most >> 16;
      updated.mu = {{}, (most & 0xFFFFu) >> 7};
      updated.is_rare |= updated.mu.exponent - 1 < kLeastExponent<true> - 1;  // small exponents
      ranked_m.template encode<true>(updated.mu.exponent, updated.mu.words);
      if constexpr (Rule::kHasNu) {  // and a v of -0, whose sign counts here
        updated.nu = {{}, most_v >> 7};
        updated.is_rare |= (updated.nu.exponent - 1 < kLeastExponent<false> - 1) | (most_v >= 0x8000u);
        ranked_v.template encode<false>(updated.nu.exponent, updated.nu.words);
      } else {
        updated.is_rare |= updated.mu.exponent == kStatePoison;  // a finite number that is rounded up to infinity
      }
    } else {
      if constexpr (Rule::kHasNu) most_v = largest_half(v);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        updated.mu.words[i] = Lanes<float>::bits(m[i]), updated.nu.words[i] = Lanes<float>::bits(v[i]);
    }
    if constexpr (Rule::kHasNu)
      if (most_v >= stepper.large_v) updated.is_rare |= has_tiny(m);
    return updated;
  }

  __device__ __forceinline__ void store(const OptimizerUpdateProblem& p, uint32_t eight) const {
    mu.store(p.mu, eight);
    if constexpr (Rule::kHasNu) nu.store(p.nu, eight);
    weight.store(p, eight, before, updates);
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
