// NVFP4 blocks that take the best of several scales (numerics.md 13): 16 elements in each lane's block, one vector after the
// other, since errors are added up in order.
//
// Where the tensor's amax and the scales are nowhere near float32's limits, which is nearly everywhere, the work is less: no
// product saturates but those of the scale below that of 6; those of the scale of 4 have no code above that of 4; and what a
// code decodes to is one of two numbers a block, A for 1 and B for 1.5, times a power of two.
#pragma once

#include "../../numerics/scale_rules.h"
#include "../../problems.h"
#include "codes.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The tensor's numbers, and whether they are far from float32's limits.
struct RoomScale : Nvfp4RoomScale {
  bool middling;

  explicit RoomScale(float amax) : Nvfp4RoomScale(nvfp4_room_scale(amax)), middling(amax > 0x1p-80f && amax < 0x1p100f) {}
};

/// 16 elements of each of kLanes blocks.
struct Sixteens {
  alignas(
      64) float minus[kBlock][kLanes];  // the elements, made negative: a product is subtracted by adding, and so are they
  U32 signs[2];                         // at the places of the signs of 8 codes
  U32 amax;                             // magnitude bits

  /// `get(place)` gives the element of all blocks at a place, a std::integral_constant.
  template <class Get>
  __attribute__((always_inline)) void read(Get get) {
    U32 even = U32{}, odd = U32{};  // maxima
    signs[0] = signs[1] = U32{};
    const auto take = [&](auto place) {
      constexpr int i = decltype(place)::value;
      const U32 bits = L::bits(L::scaled(get(place), L::splat(1.0f)));  // zeros, and subnormal numbers, become +0
      const U32 a = bits & kMagnitudeBits;
      store(minus[i], bits | kSignBit);
      (i % 2 ? odd : even) = max_magnitude(i % 2 ? odd : even, a);
      signs[i / 8] |= (bits & kSignBit) >> (28 - 4 * (i % 8));
    };
    for_each_place(take, std::make_integer_sequence<int, kBlock>());
    amax = max_magnitude(even, odd);
  }
};

/// The entry of a table, of as many as there are codes, for each code, found in the low bits of e2m1_magnitude_bits.
JLP_RULE F32 of_code(const float (&table)[8], U32 code) {
#if defined(JLP_ISA_AVX512)
  const __m512 entries = _mm512_castps256_ps512(_mm256_loadu_ps(table));
  return (F32)_mm512_permutexvar_ps(raw(code), entries);  // by four bits, of which the first is 0
#elif defined(JLP_ISA_AVX2)
  return (F32)_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), raw(code));
#else
  F32 found;
  for (int i = 0; i < kLanes; ++i) found[i] = table[code[i] & 7u];
  return found;
#endif
}

/// b where the sign bit of `sign` is set, else a.
JLP_RULE F32 by_sign(F32 sign, F32 a, F32 b) {
#if defined(JLP_ISA_AVX512)
  return (F32)_mm512_mask_blend_ps(_mm512_movepi32_mask(raw((U32)sign)), raw(a), raw(b));
#elif defined(JLP_ISA_AVX2)
  return (F32)_mm256_blendv_ps(raw(a), raw(b), raw(sign));
#else
  return (I32)sign < 0 ? b : a;
#endif
}

/// x / 1536, rounded once, of an x that is far from float32's limits.
JLP_RULE F32 divided_by_room(F32 x) {
#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
  const F32 third = L::splat(0x1.555556p-2f), q = x * third;  // 1536 is 3 * 2^9; the remainder is exact, and corrects q
  return L::fused_multiply_add(L::fused_multiply_add(L::splat(-3.0f), q, x), third, q) * 0x1p-9f;
#else
  return x / kNvfp4Room;
#endif
}

constexpr float kE2M1Numbers[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
/// The same over A, or negative, over B, which is 1.5 A up to rounding.
constexpr float kPowersOfHalves[8] = {0.0f, 0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 4.0f, -4.0f};

/// A scale to try on kLanes blocks.
struct Trial : TriedScale<F32> {
  F32 minus_encode;
  F32 one, minus_three_halves;  // A, and -B; not of errors relative to the tensor

  template <ScaleError kError>
  __attribute__((always_inline)) void set(const RoomScale& tensor) {
    minus_encode = -nvfp4_block_encode_by_value(value, tensor.decode);
    if constexpr (kError == ScaleError::kRelativeSquared) return;
    one = divided_by_room(value * tensor.amax);
    minus_three_halves = -divided_by_room(value * 1.5f * tensor.amax);
  }
};

/// The error of elements, made negative, whose codes are in the low bits of `code`; `kMiddling`: all is far from float32's
/// limits.
template <ScaleError kError, bool kMiddling>
JLP_RULE F32 error_of(F32 minus, U32 code, const Trial& trial, const RoomScale& tensor) {
  F32 d;
  if constexpr (!kMiddling) {
    return nvfp4_error<kError>(-minus, of_code(kE2M1Numbers, code), trial.value, tensor);
  } else if constexpr (kError == ScaleError::kRelativeSquared) {
    d = L::multiply_add_exact(of_code(kE2M1Numbers, code), trial.value, minus * tensor.encode);
  } else {
    const F32 power = of_code(kPowersOfHalves, code);
    d = L::multiply_add_exact(power, by_sign(power, trial.one, trial.minus_three_halves), minus);
  }
  return kError == ScaleError::kAbsolute ? absolute(d) : d * d;
}

/// The scales to try on kLanes blocks.
template <ScaleError kError>
struct Trials {
  static constexpr int kCount = scales_tried(kError);
  Trial trial[kCount];
  bool middling;  // all is far from float32's limits

  __attribute__((always_inline)) void set(U32 amax, const RoomScale& tensor) {
    TriedScale<F32> scales[kCount];
    const F32 minus = -L::from_bits(amax);
    nvfp4_scales(L::from_bits(amax), tensor.encode, scales);
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) {
      static_cast<TriedScale<F32>&>(trial[t]) = scales[t];
      trial[t].template set<kError>(tensor);
    }
    middling =
        tensor.middling && all_below(minus * trial[0].minus_encode, 7.0f) && all_below(minus * trial[1].minus_encode, 4.5f);
  }
};

/// What came of them: the sums of the errors of 16 elements, and their codes without signs.
template <ScaleError kError>
struct Outcome {
  static constexpr int kCount = scales_tried(kError);
  F32 error[kCount];
  U32 codes[kCount][2];

  template <bool kMiddling>
  __attribute__((always_inline)) void add_up(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    constexpr uint32_t kOffsets = kE2M1MagicBits * 0x11111111u;  // of 8 codes, a nibble apart, modulo 2^32
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) error[t] = F32{}, codes[t][0] = codes[t][1] = fill<F32>(0u - kOffsets);
    const auto add = [&](auto place) {
      constexpr int i = decltype(place)::value;
      const F32 minus = load<F32>(x.minus[i]);
      add_by<kMiddling, 0, i>(minus, trials.trial[0], tensor);
      add_by<kMiddling, 1, i>(minus, trials.trial[1], tensor);
      if constexpr (kCount > 2) add_by<kMiddling, 2, i>(minus, trials.trial[2], tensor);
    };
    for_each_place(add, std::make_integer_sequence<int, kBlock>());
  }

  __attribute__((noinline)) void add_up_extreme(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    add_up<false>(x, trials, tensor);
  }

  __attribute__((always_inline)) void add_up(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    if (__builtin_expect(trials.middling, 1))
      add_up<true>(x, trials, tensor);
    else
      add_up_extreme(x, trials, tensor);
  }

  /// Puts the best of the scales first; an equal error keeps the earlier one.
  __attribute__((always_inline)) void choose(Trials<kError>& trials) {
    Trial& best = trials.trial[0];
    JLP_UNROLL(2)
    for (int t = 1; t < kCount; ++t) {
      const auto better = error[t] < error[0];
      error[0] = better ? error[t] : error[0];
      best.byte = better ? trials.trial[t].byte : best.byte;
      best.minus_encode = better ? trials.trial[t].minus_encode : best.minus_encode;
      for (int half = 0; half < 2; ++half) codes[0][half] = better ? codes[t][half] : codes[0][half];
    }
  }

 private:
  template <bool kMiddling, int t, int i>
  __attribute__((always_inline)) void add_by(F32 minus, const Trial& trial, const RoomScale& tensor) {
    const F32 y = minus * trial.minus_encode;
    U32 code;
    if constexpr (kMiddling && t == 1)
      code = e2m1_magnitude_bits_to_four(y);
    else
      code = e2m1_magnitude_bits(kMiddling && t == 0 ? y : L::min(y, L::splat(kE2M1Max)));
    codes[t][i / 8] += code << (4 * (i % 8));
    error[t] += error_of<kError, kMiddling>(minus, code, trial, tensor);
  }
};

/// Codes and scale bytes of kLanes blocks of 16. A block that holds NaN or infinity has the scale NaN and codes 0.
struct BestCodes {
  U32 codes[2], scale;

  /// Makes them those of such blocks, by the magnitude bits of the blocks' amaxes.
  __attribute__((always_inline)) void poison(U32 amax) {
    if (__builtin_expect(all_below(L::from_bits(amax), __builtin_inff()), 1)) return;
    const auto poisoned = amax >= kInfinityBits;
    scale = poisoned ? fill<F32>(kFloat8NaN) : scale;
    codes[0] = poisoned ? U32{} : codes[0], codes[1] = poisoned ? U32{} : codes[1];
  }
};

/// Several times kLanes blocks. All their scales come before the first is tried, so that one's long chain of dependent steps
/// hides behind the others'.
template <ScaleError kError>
struct BestSpan {
  static constexpr int kMost = 8;
  Sixteens sixteens[kMost];
  Trials<kError> trials[kMost];

  __attribute__((noinline)) void set(int count, const RoomScale& tensor) {
    for (int n = 0; n < count; ++n) trials[n].set(sixteens[n].amax, tensor);
  }

  /// `scale_of` gives the scale bytes from the elements, the best scale and the codes without signs.
  template <class ScaleOf>
  __attribute__((always_inline)) BestCodes choose_by(int n, const RoomScale& tensor, ScaleOf scale_of) {
    const Sixteens& x = sixteens[n];
    Outcome<kError> outcome;
    outcome.add_up(x, trials[n], tensor);
    outcome.choose(trials[n]);
    const U32(&codes)[2] = outcome.codes[0];
    BestCodes best{{codes[0] | x.signs[0], codes[1] | x.signs[1]}, scale_of(x, trials[n].trial[0], codes)};
    best.poison(x.amax);
    return best;
  }
};

/// Whose scales are those that were tried, without random bits.
template <ScaleError kError>
struct NearestSpan : BestSpan<kError> {
  __attribute__((always_inline)) BestCodes choose(int n, const RoomScale& tensor, U32) {
    return this->choose_by(n, tensor, [](const Sixteens&, const Trial& trial, const U32(&)[2]) { return trial.byte; });
  }
};

/// A type as a value.
template <class T>
struct Tag {
  using Type = T;
};

// --- rows: the elements of kLanes blocks that lie together, a block in each lane

/// A packet's words (pairs of 16-bit elements, or float32 elements) with those at the same place of all blocks together.
template <class E>
struct TurnedPacket {
  static constexpr int kWordsOfBlock = kBlock * static_cast<int>(sizeof(typename E::Storage)) / 4;
  alignas(64) uint32_t words[kWordsOfBlock][kLanes];

  explicit TurnedPacket(const typename E::Storage* x) {
    U32 v[kWordsOfBlock];
    JLP_UNROLL(16)
    for (int i = 0; i < kWordsOfBlock; ++i)
      v[i] = load<U32>(reinterpret_cast<const uint8_t*>(x) + i * static_cast<int>(JLP_VECTOR_BYTES));
    U32 w[kWordsOfBlock];
    if constexpr (kLanes <= kWordsOfBlock) {
      JLP_UNROLL(4)
      for (int step = 1; step < kLanes; step *= 2) {  // the first half of the words in turns with the second
        JLP_UNROLL(16)
        for (int i = 0; i < kWordsOfBlock; ++i)
          w[i] = i % 2 ? shuffle<InterleaveHigh>(v[i / 2], v[i / 2 + kWordsOfBlock / 2])
                       : shuffle<InterleaveLow>(v[i / 2], v[i / 2 + kWordsOfBlock / 2]);
        memcpy(v, w, sizeof v);
      }
    } else {
      JLP_UNROLL(4)
      for (int step = 1; step < kWordsOfBlock; step *= 2) {  // the same backwards is less
        JLP_UNROLL(16)
        for (int i = 0; i < kWordsOfBlock / 2; ++i) {
          w[i] = shuffle<EvenLanes>(v[2 * i], v[2 * i + 1]);
          w[i + kWordsOfBlock / 2] = shuffle<OddLanes>(v[2 * i], v[2 * i + 1]);
        }
        memcpy(v, w, sizeof v);
      }
    }
    JLP_UNROLL(16)
    for (int i = 0; i < kWordsOfBlock; ++i) store(words[i], v[i]);
  }

  template <int i>
  __attribute__((always_inline)) F32 element() const {
    if constexpr (sizeof(typename E::Storage) == 4) {
      return load<F32>(words[i]);
    } else {
      const Pair pair = E::load_pair(reinterpret_cast<const typename E::Storage*>(words[i / 2]));
      return i % 2 ? pair.odd : pair.even;
    }
  }
};

template <class E>
__attribute__((noinline)) void read_row_packet(const typename E::Storage* x, Sixteens& sixteens) {
  const TurnedPacket<E> turned(x);
  sixteens.read([&](auto place) { return turned.template element<decltype(place)::value>(); });
}

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
      const BestCodes best = span.choose(n, tensor, bits ? load<U32>(bits + (first + n) * kLanes) : U32{});
      store_interleaved(data, best.codes[0], best.codes[1]);
      store_low_bytes(scale, best.scale);
    }
  }
}

// --- columns

/// The even and the odd ones of 2 * kLanes columns of a slab.
template <class E>
JLP_RULE void read_columns(const typename E::Storage* x, Sixteens& even, Sixteens& odd) {
  even.read([&](auto place) { return E::load_pair(x + decltype(place)::value * kPacket).even; });
  odd.read([&](auto place) { return E::load_pair(x + decltype(place)::value * kPacket).odd; });
}

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
      const BestCodes even = span.choose(2 * n, tensor, shuffle<EvenLanes>(low, high));
      const BestCodes odd = span.choose(2 * n + 1, tensor, shuffle<OddLanes>(low, high));
      store_interleaved(&codes[0][at], even.codes[0], even.codes[1]);
      store_interleaved(&codes[1][at], odd.codes[0], odd.codes[1]);
      store_low_bytes(scale, shuffle<InterleaveLow>(even.scale, odd.scale));
      store_low_bytes(scale + kLanes, shuffle<InterleaveHigh>(even.scale, odd.scale));
    }
  }
}

// --- 16x16 tiles

/// Scale bytes of a slab's tiles and what their elements are multiplied by, from the maxima of the tiles. A tile that holds
/// NaN or infinity has NaN for both.
template <class E, ScaleError kError>
__attribute__((noinline)) void best_tile_scales(const typename E::Storage (*x)[kPacket], U32 amax, const RoomScale& tensor,
                                                U32& scale, F32& encode) {
  constexpr int kCount = scales_tried(kError);
  Trials<kError> trials;
  trials.set(amax, tensor);
  Outcome<kError> outcome;
  F32 errors[kCount][kBlock];
  Sixteens sixteens;
  for (int r = 0; r < kBlock; ++r) {
    read_row_packet<E>(x[r], sixteens);
    outcome.add_up(sixteens, trials, tensor);
    for (int t = 0; t < kCount; ++t) errors[t][r] = outcome.error[t];
  }
  for (int t = 0; t < kCount; ++t) {
    for (int rows = kBlock / 2; rows > 0; rows /= 2)
      for (int r = 0; r < rows; ++r) errors[t][r] += errors[t][r + rows];
    outcome.error[t] = errors[t][0];
  }
  outcome.choose(trials);
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
