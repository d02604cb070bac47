// NVFP4 blocks that take the best of several scales (numerics.md 13): which one, by estimates of the errors where they tell
// and else by the exact sums, and then the codes by it.
#pragma once

#include "../../problems.h"
#include "scale_errors.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Which scale has the least error (numerics.md 13), by estimates in 16-bit lanes: half the work of the exact sums
// (scale_errors.h), which are left to blocks whose errors are nearer each other than the estimates are sure of.
//
// Of an element x that is scaled to v = |x| / U, U = S * g / 1536, the estimate is D, the distance of n = round(8192 |x|
// enc) from the nearest number of E2M1, in units of 1 / 8192. With u = 2^-24 and v < 8, in those units:
//   - enc is 1 / U within 4 u, so n is v within 1/2 + 0.02, and D, which changes by no more than n does, v's real distance;
//   - the code is that of x * enc, which is v within 5 u: a number that is not nearest is as near within 0.04;
//   - d / U, or d / S relative to the tensor, is that code's distance within 0.01: what is rounded are numbers below 8.
// So it is D within kDoubt = 0.6, and 0.03 of that are left for the roundings of sums. Sums of N = 16 rows elements then
// differ by N kDoubt at most. Sums of squares, by kDoubt (2 sum(D) + N kDoubt), where sum(D) <= sqrt(N A), A = sum(D^2); and
// 2 sqrt(N A) <= 4 A / r + N r / 4 for every r. What is left of both is more than the relative roundings, 2^-18, and, for
// the tensors that `usable` names, than what squares lose below 2^-126.

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)

constexpr bool kEstimates = true;
constexpr float kDoubt = 0.6f;

/// n of two elements that are made negative, the second in the upper half.
JLP_RULE U32 fixed_pair(F32 even, F32 odd, F32 minus_encode) {
  const F32 magic = L::splat(1024.0f);  // whose last place is 1 / 8192
  const U32 low = L::bits(L::fused_multiply_add(even, minus_encode, magic));
  const U32 high = L::bits(L::fused_multiply_add(odd, minus_encode, magic)) << 16;
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_mask_blend_epi16(0xAAAAAAAA, raw(low), raw(high));
#else
  return (U32)_mm256_blend_epi16(raw(low), raw(high), 0xAA);
#endif
}

/// From numbers below 7 to the nearest of E2M1, of either sign. The step between those is 1/2 below 2, 1 below 4, then 2.
JLP_RULE U32 distances(U32 n) {
#if defined(JLP_ISA_AVX512)
  // Shifted so that a step is 2^16, numbers wrap around to the distance.
  const __m512i shifts = _mm512_broadcast_i32x4(_mm_setr_epi16(4, 4, 3, 3, 2, 2, 2, 2));  // by the whole part
  const __m512i shift = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw(n), 13), shifts);
  return (U32)_mm512_srav_epi16(_mm512_sllv_epi16(raw(n), shift), shift);
#else
  // The upper bytes of steps, by the whole part in the upper byte; what the lower byte finds is taken away.
  const __m256i steps =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0x10, 0x10, 0x20, 0x20, 0x40, 0x40, 0x40, 0x40, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i found = _mm256_shuffle_epi8(steps, _mm256_srli_epi16(raw(n), 5));
  const __m256i step = _mm256_and_si256(found, _mm256_set1_epi16(-0x100));
  const __m256i rest = _mm256_and_si256(raw(n), _mm256_add_epi16(step, _mm256_set1_epi16(-1)));
  return (U32)_mm256_min_epi16(rest, _mm256_sub_epi16(step, rest));
#endif
}

/// The same of numbers below 8: beyond 6, to 6.
JLP_RULE U32 distances_saturating(U32 n) {
  constexpr int16_t kSix = static_cast<int16_t>(6 * 8192);
#if defined(JLP_ISA_AVX512)
  const __m512i above = _mm512_subs_epu16(raw(n), _mm512_set1_epi16(kSix));
  return (U32)_mm512_max_epi16(_mm512_abs_epi16(raw(distances(n))), above);
#else
  const __m256i above = _mm256_subs_epu16(raw(n), _mm256_set1_epi16(kSix));
  return (U32)_mm256_max_epi16(raw(distances(n)), above);
#endif
}

/// sum + the products of both halves of lanes.
JLP_RULE U32 add_products(U32 sum, U32 a, U32 b) {
#if defined(JLP_ISA_AVX512)
  return (U32)_mm512_dpwssd_epi32(raw(sum), raw(a), raw(b));
#else
  return sum + (U32)_mm256_madd_epi16(raw(a), raw(b));
#endif
}

/// The scales to try, and what estimates take of them.
template <ScaleError kError>
struct EstimatedTrials : Trials<kError> {
  static constexpr int kCount = scales_tried(kError);
  bool usable;  // the estimates hold: all is far from float32's limits, and of their squares

  __attribute__((always_inline)) void set(U32 amax, const RoomScale& tensor) {
    Trials<kError>::set(amax, tensor);
    usable = this->middling;
    if constexpr (kError == ScaleError::kSquared) usable &= tensor.amax > 0x1p-32f && tensor.amax < 0x1p60f;
    // Distances are 1.25 at most, and sums of 16 squares of them below 2^31.
    if constexpr (kCount > 2) usable &= all_below(L::from_bits(amax) * -this->trial[2].minus_encode, 7.25f);
  }
};

/// The sums of the distances of elements, or of their squares, by each of the scales.
template <ScaleError kError>
struct Estimates {
  static constexpr int kCount = scales_tried(kError);
  F32 sum[kCount];

  /// Those of 16 elements.
  __attribute__((always_inline)) void add_up(const Sixteens& x, const EstimatedTrials<kError>& trials) {
    U32 sums[kCount][kTurns];
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t)
      for (int turn = 0; turn < kTurns; ++turn) sums[t][turn] = U32{};
    JLP_UNROLL(1)  // the compiler would reorder all the additions, for which there are not enough registers
    for (int i = 0; i < kBlock; i += 2 * kTurns) {
      JLP_UNROLL(2)
      for (int turn = 0; turn < kTurns; ++turn) {
        const F32 even = load<F32>(x.minus[i + 2 * turn]), odd = load<F32>(x.minus[i + 2 * turn + 1]);
        add(sums[0][turn], distances(fixed_pair(even, odd, trials.trial[0].minus_encode)));
        add(sums[1][turn], distances(fixed_pair(even, odd, trials.trial[1].minus_encode)));
        if constexpr (kCount > 2)
          add(sums[2][turn], distances_saturating(fixed_pair(even, odd, trials.trial[2].minus_encode)));
      }
    }
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) sum[t] = L::to_float(kTurns > 1 ? sums[t][0] + sums[t][kTurns - 1] : sums[t][0]);
  }

  /// Those of more elements.
  __attribute__((always_inline)) void add(const Estimates& more) {
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) sum[t] += more.sum[t];
  }

  /// Puts the best of the scales first. False if in some lane the exact errors may choose another. `rows`: how many sums of
  /// 16 were added up.
  __attribute__((always_inline)) bool choose(EstimatedTrials<kError>& trials, U32 amax, int rows) const {
    if (__builtin_expect(!trials.usable, 0)) return false;
    F32 error[kCount], doubt[kCount], rival = L::splat(kMaxFinite);  // the least that any but the best may be
    Trial best = trials.trial[0];
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) {
      const F32 scale = trials.trial[t].value, weight = kSquares ? scale * scale : scale;
      error[t] = sum[t] * weight, doubt[t] = doubt_of(sum[t], rows) * weight;
    }
    JLP_UNROLL(2)
    for (int t = 1; t < kCount; ++t) {
      const auto better = error[t] < error[0];
      rival = L::min(rival, better ? error[0] - doubt[0] : error[t] - doubt[t]);
      error[0] = better ? error[t] : error[0], doubt[0] = better ? doubt[t] : doubt[0];
      best.replace(trials.trial[t], better);
    }
    const F32 overlap = amax < kMinNormalBits ? L::splat(-1.0f) : error[0] + doubt[0] - rival;  // zeros have no errors
    if (__builtin_expect(!all_below(overlap, 0.0f), 0)) return false;
    trials.trial[0] = best;
    return true;
  }

 private:
  static constexpr int kTurns = JLP_VECTOR_BYTES == 64 ? 2 : 1;  // one chain of add_products would take long there
  static constexpr bool kSquares = kError != ScaleError::kAbsolute;

  JLP_RULE void add(U32& sum, U32 distance) {
    if constexpr (kSquares) {
      sum = add_products(sum, distance, distance);
    } else {
#if defined(JLP_ISA_AVX512)  // elsewhere there are no signs
      distance = (U32)_mm512_abs_epi16(raw(distance));
#endif
      sum = add_products(sum, distance, fill<F32>(0x00010001u));
    }
  }

  JLP_RULE F32 doubt_of(F32 sum, int rows) {
    constexpr float kUsual = 6144;  // r: the root of a sum of squares that is as usual
    const float elements = kBlock * static_cast<float>(rows);
    return kSquares ? (sum * (4 / kUsual) + elements * (kUsual / 4 + kDoubt)) * kDoubt : L::splat(elements * kDoubt);
  }
};

#else  // the exact errors alone

constexpr bool kEstimates = false;
template <ScaleError kError>
using EstimatedTrials = Trials<kError>;
template <ScaleError>
struct Estimates {};

#endif

/// Several times kLanes blocks. Each step is done for all of them, so that one's long chain of dependent operations hides
/// behind the others'.
template <ScaleError kError>
struct BestSpan {
  static constexpr int kMost = 8;
  Sixteens sixteens[kMost];
  EstimatedTrials<kError> trials[kMost];  // of these, in the end, the first are the best

  __attribute__((noinline)) void set(int count, const RoomScale& tensor) {
    for (int n = 0; n < count; ++n) trials[n].set(sixteens[n].amax, tensor);
    if constexpr (kEstimates) {
      Estimates<kError> estimates[kMost];
      for (int n = 0; n < count; ++n) estimates[n].add_up(sixteens[n], trials[n]);
      for (int n = 0; n < count; ++n)
        if (__builtin_expect(!estimates[n].choose(trials[n], sixteens[n].amax, 1), 0)) choose_exactly(n, tensor);
    } else {
      for (int n = 0; n < count; ++n) choose_exactly(n, tensor);
    }
  }

  F32 minus_encode(int n) const { return trials[n].trial[0].minus_encode; }
  U32 scale(int n) const { return trials[n].trial[0].byte; }

 private:
  __attribute__((noinline)) void choose_exactly(int n, const RoomScale& tensor) {
    Errors<kError> errors;
    errors.add_up(sixteens[n], trials[n], tensor);
    errors.choose(trials[n]);
  }
};

/// Whose scales are those that were tried, without random bits.
template <ScaleError kError>
struct NearestSpan : BestSpan<kError> {
  template <bool kSaturate>
  __attribute__((always_inline)) BlockCodes encode(int n, U32) const {
    BlockCodes found;
    found.encode<kSaturate>(this->sixteens[n], this->minus_encode(n), [](F32, U32) __attribute__((always_inline)){});
    found.scale = this->scale(n);
    return found;
  }
};

/// A type as a value.
template <class T>
struct Tag {
  using Type = T;
};

// --- rows

/// Codes and scales of packets that lie together. `bits`: random ones of each block; null for spans that take none.
template <class E, class Span>
__attribute__((noinline)) void encode_best_packets(const typename E::Storage* x, int packets, const RoomScale& tensor,
                                                   const uint32_t* bits, const PacketsAhead<E>& ahead, uint8_t* data,
                                                   uint8_t* scale) {
  Span span;
  for (int first = 0; first < packets; first += Span::kMost) {
    const int count = std::min(packets - first, Span::kMost);
    for (int n = 0; n < count; ++n) {
      ahead.fetch(first + n);
      read_row_packet<E>(x + (first + n) * kPacket, span.sixteens[n]);
    }
    span.set(count, tensor);
    for (int n = 0; n < count; ++n, data += kPacketBytes, scale += kLanes) {
      const BlockCodes found = encode(span, n, bits ? load<U32>(bits + (first + n) * kLanes) : U32{});
      store_interleaved(data, found.codes[0], found.codes[1]);
      store_low_bytes(scale, found.scale);
    }
  }
}

// --- columns

/// Codes and scales of a slab's columns, as encode_slab_columns and column_scales have them. `bits`: random ones of each
/// column; null for spans that take none.
template <class E, class Span>
__attribute__((noinline)) void encode_best_slab_columns(const typename E::Storage* x, const RoomScale& tensor,
                                                        const uint32_t* bits, int pairs, const PacketsAhead<E>& ahead,
                                                        uint64_t (&codes)[2][kPacket / 2], uint8_t* scale) {
  Span span;
  for (int first = 0; first < pairs; first += Span::kMost / 2) {
    const int count = std::min(pairs - first, Span::kMost / 2);
    for (int n = 0; n < count; ++n) {
      const int j = first + n;
      for (int r = 2 * j; r < 2 * j + kBlock / kPairs; ++r) ahead.fetch(r);
      read_columns<E>(x + 2 * kLanes * j, span.sixteens[2 * n], span.sixteens[2 * n + 1]);
    }
    span.set(2 * count, tensor);
    for (int n = 0; n < count; ++n, scale += 2 * kLanes) {
      const int at = kLanes * (first + n);
      const U32 low = bits ? load<U32>(bits + 2 * at) : U32{}, high = bits ? load<U32>(bits + 2 * at + kLanes) : U32{};
      const BlockCodes even = encode(span, 2 * n, shuffle<EvenLanes>(low, high));
      const BlockCodes odd = encode(span, 2 * n + 1, shuffle<OddLanes>(low, high));
      store_interleaved(&codes[0][at], even.codes[0], even.codes[1]);
      store_interleaved(&codes[1][at], odd.codes[0], odd.codes[1]);
      store_low_bytes(scale, shuffle<InterleaveLow>(even.scale, odd.scale));
      store_low_bytes(scale + kLanes, shuffle<InterleaveHigh>(even.scale, odd.scale));
    }
  }
}

// --- 16x16 tiles

/// The exact errors of a slab's tiles put the best of the scales first.
template <class E, ScaleError kError>
__attribute__((noinline)) void choose_tile_scales_exactly(const typename E::Storage (*x)[kPacket], const RoomScale& tensor,
                                                          Trials<kError>& trials) {
  constexpr int kCount = scales_tried(kError);
  Errors<kError> errors;
  F32 sums[kCount][kBlock];
  Sixteens sixteens;
  for (int r = 0; r < kBlock; ++r) {
    read_row_packet<E>(x[r], sixteens);
    errors.add_up(sixteens, trials, tensor);
    for (int t = 0; t < kCount; ++t) sums[t][r] = errors.sum[t];
  }
  for (int t = 0; t < kCount; ++t) {
    for (int rows = kBlock / 2; rows > 0; rows /= 2)
      for (int r = 0; r < rows; ++r) sums[t][r] += sums[t][r + rows];
    errors.sum[t] = sums[t][0];
  }
  errors.choose(trials);
}

/// Scale bytes of a slab's tiles and what their elements are multiplied by, from the maxima of the tiles. A tile that holds
/// NaN or infinity has NaN for both.
template <class E, ScaleError kError>
__attribute__((noinline)) void best_tile_scales(const typename E::Storage (*x)[kPacket], U32 amax, const RoomScale& tensor,
                                                U32& scale, F32& encode) {
  EstimatedTrials<kError> trials;
  trials.set(amax, tensor);
  bool chosen = false;
  if constexpr (kEstimates) {
    Estimates<kError> all, row;
    Sixteens sixteens;
    for (int r = 0; r < kBlock; ++r) {
      read_row_packet<E>(x[r], sixteens);
      (r > 0 ? row : all).add_up(sixteens, trials);
      if (r > 0) all.add(row);
    }
    chosen = all.choose(trials, amax, kBlock);
  }
  if (__builtin_expect(!chosen, !kEstimates)) choose_tile_scales_exactly<E, kError>(x, tensor, trials);
  const auto poisoned = amax >= kInfinityBits;
  scale = poisoned ? fill<F32>(kFloat8NaN) : trials.trial[0].byte;
  encode = poisoned ? L::from_bits(fill<F32>(kNaNBits)) : -trials.trial[0].minus_encode;
}

/// Calls visit with the error that a rule compares scales by, a std::integral_constant.
template <class Visit>
auto with_scale_error(ScaleRule rule, Visit visit) {
  switch (rule) {
    case ScaleRule::kFourOverSix: return visit(std::integral_constant<ScaleError, ScaleError::kAbsolute>());
    case ScaleRule::kFourOverSixMse: return visit(std::integral_constant<ScaleError, ScaleError::kSquared>());
    default: return visit(std::integral_constant<ScaleError, ScaleError::kRelativeSquared>());
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
