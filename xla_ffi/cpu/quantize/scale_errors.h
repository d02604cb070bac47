// The scales that NVFP4 blocks may take, and the errors that a rule compares them by (numerics.md 13).
//
// Where the tensor's amax and the scales are nowhere near float32's limits, which is nearly everywhere, the work is less: no
// product saturates but those of the scale below that of 6; those of the scale of 4 have no code above that of 4; and what a
// code decodes to is one of two numbers a block, A for 1 and B for 1.5, times a power of two.
#pragma once

#include "../../numerics/nvfp4.h"
#include "codes.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Blocks of NVFP4 side by side: a block in each lane and its 16 elements in as many vectors, for what is added up in the
// order of the elements.

/// 16 elements of each of kLanes blocks.
struct Sixteens {
  alignas(
      64) float minus[kBlock][kLanes];  // the elements, made negative: a product is subtracted by adding, and so are they
  U32 signs[2];                         // at the places of the signs of 8 codes; of zeros, and subnormal numbers, none
  U32 amax;                             // magnitude bits

  /// `get(place)` gives the element of all blocks at a place, a std::integral_constant.
  template <class Get>
  __attribute__((always_inline)) void read(Get get) {
    U32 even = fill<F32>(kSignBit), odd = even;  // maxima of magnitudes, all with the sign bit
    signs[0] = signs[1] = U32{};
    const auto take = [&](auto place) __attribute__((always_inline)) {
      constexpr int i = decltype(place)::value;
      const F32 element = L::flush(get(place));
      const U32 minus_bits = L::bits(element) | kSignBit;
      store(minus[i], minus_bits);
      (i % 2 ? odd : even) = max_unsigned(i % 2 ? odd : even, minus_bits);
      signs[i / 8] = with_bit_if_negative<4 * (i % 8) + 3>(signs[i / 8], element);
    };
    for_each_place(take, std::make_integer_sequence<int, kBlock>());
    amax = max_unsigned(even, odd) & kMagnitudeBits;
  }

 private:
  JLP_RULE U32 max_unsigned(U32 a, U32 b) {
#if defined(JLP_ISA_AVX512)
    return (U32)_mm512_max_epu32(raw(a), raw(b));
#elif defined(JLP_ISA_AVX2)
    return (U32)_mm256_max_epu32(raw(a), raw(b));
#else
    return a > b ? a : b;
#endif
  }

  /// `bits`, and in lanes whose element is less than zero one more.
  template <int kBit>
  JLP_RULE U32 with_bit_if_negative(U32 bits, F32 element) {
    constexpr uint32_t kOne = 1u << kBit;
#if defined(JLP_ISA_AVX512)
    const __mmask16 negative = _mm512_cmp_ps_mask(raw(element), _mm512_setzero_ps(), _CMP_LT_OQ);
    return (U32)_mm512_mask_or_epi32(raw(bits), negative, raw(bits), _mm512_set1_epi32(static_cast<int>(kOne)));
#else
    return bits | ((U32)(element < 0.0f) & kOne);
#endif
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

constexpr float kE2M1Numbers[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

/// Codes and scale bytes of kLanes blocks of 16. A block that holds NaN or infinity has the scale NaN and codes 0.
struct BlockCodes {
  U32 codes[2], scale;

  /// Makes the codes, from what the elements, made negative, are multiplied by. `kSaturate`: products may be 7 or more.
  /// `also` is called with each product, in order, and its code, in the low bits of e2m1_magnitude_bits.
  template <bool kSaturate, class Also>
  __attribute__((always_inline)) void encode(const Sixteens& x, F32 minus_encode, Also also) {
    constexpr uint32_t kOffsets = kE2M1MagicBits * 0x11111111u;  // of 8 codes, a nibble apart, modulo 2^32
    codes[0] = codes[1] = fill<F32>(0u - kOffsets);
    const auto add = [&](auto place) __attribute__((always_inline)) {
      constexpr int i = decltype(place)::value;
      const F32 y = load<F32>(x.minus[i]) * minus_encode;
      const U32 code = e2m1_magnitude_bits(kSaturate ? L::min(y, L::splat(kE2M1Max)) : y);
      codes[i / 8] += code << (4 * (i % 8));
      also(y, code);
    };
    for_each_place(add, std::make_integer_sequence<int, kBlock>());
    codes[0] |= x.signs[0], codes[1] |= x.signs[1];
  }

  /// Makes them those of such blocks, by the magnitude bits of the blocks' amaxes.
  __attribute__((always_inline)) void poison(U32 amax) {
    if (__builtin_expect(all_below(L::from_bits(amax), __builtin_inff()), 1)) return;
    const auto poisoned = amax >= kInfinityBits;
    scale = poisoned ? fill<F32>(kFloat8NaN) : scale;
    codes[0] = poisoned ? U32{} : codes[0], codes[1] = poisoned ? U32{} : codes[1];
  }
};

/// Those of the n-th kLanes blocks of a span, with their random bits if it takes them.
template <class Span>
__attribute__((noinline)) BlockCodes encode_saturating(const Span& span, int n, U32 bits) {
  BlockCodes found = span.template encode<true>(n, bits);
  found.poison(span.sixteens[n].amax);
  return found;
}
template <class Span>
JLP_RULE BlockCodes encode(const Span& span, int n, U32 bits) {
  if (__builtin_expect(all_below(-L::from_bits(span.sixteens[n].amax) * span.minus_encode(n), 7.0f), 1))
    return span.template encode<false>(n, bits);
  return encode_saturating(span, n, bits);
}

// --- rows: the elements of kLanes blocks that lie together

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
    [[maybe_unused]] U32 w[kWordsOfBlock];
    if constexpr (kLanes == kWordsOfBlock) {
      transpose(v);
    } else if constexpr (kLanes < kWordsOfBlock) {
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
  sixteens.read([&](auto place)
                    __attribute__((always_inline)) { return turned.template element<decltype(place)::value>(); });
}

// --- columns

/// The even and the odd ones of 2 * kLanes columns of a slab.
template <class E>
JLP_RULE void read_columns(const typename E::Storage* x, Sixteens& even, Sixteens& odd) {
  even.read([&](auto place)
                __attribute__((always_inline)) { return E::load_pair(x + decltype(place)::value * kPacket).even; });
  odd.read([&](auto place)
               __attribute__((always_inline)) { return E::load_pair(x + decltype(place)::value * kPacket).odd; });
}

/// The tensor's numbers, and whether they are far from float32's limits.
struct RoomScale : Nvfp4RoomScale {
  bool middling;

  explicit RoomScale(float amax) : Nvfp4RoomScale(nvfp4_room_scale(amax)), middling(amax > 0x1p-80f && amax < 0x1p100f) {}
};

/// A scale to try on kLanes blocks.
struct Trial : TriedScale<F32> {
  F32 minus_encode;

  /// Becomes another in lanes where that is better, but for `value`.
  template <class Mask>
  __attribute__((always_inline)) void replace(const Trial& other, Mask better) {
    byte = better ? other.byte : byte;
    minus_encode = better ? other.minus_encode : minus_encode;
  }
};

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
      trial[t].minus_encode = -nvfp4_block_encode_by_value(scales[t].value, tensor.decode);
    }
    middling =
        tensor.middling && all_below(minus * trial[0].minus_encode, 7.0f) && all_below(minus * trial[1].minus_encode, 4.5f);
  }
};

/// x / 1536, rounded once, of an x that is far from float32's limits.
JLP_RULE F32 divided_by_room(F32 x) {
#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
  const F32 third = L::splat(0x1.555556p-2f), q = x * third;  // 1536 is 3 * 2^9; the remainder is exact, and corrects q
  return L::fused_multiply_add(L::fused_multiply_add(L::splat(-3.0f), q, x), third, q) * 0x1p-9f;
#else
  return x / kNvfp4Room;
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

/// kE2M1Numbers over A, or negative, over B, which is 1.5 A up to rounding.
constexpr float kPowersOfHalves[8] = {0.0f, 0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 4.0f, -4.0f};

/// The sums of the errors of 16 elements, by each of the scales.
template <ScaleError kError>
struct Errors {
  static constexpr int kCount = scales_tried(kError);
  F32 sum[kCount];

  __attribute__((noinline)) void add_up(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    trials.middling ? add_up_by<true>(x, trials, tensor) : add_up_by<false>(x, trials, tensor);
  }

  /// Puts the best of the scales first; an equal error keeps the earlier one.
  __attribute__((always_inline)) void choose(Trials<kError>& trials) {
    JLP_UNROLL(2)
    for (int t = 1; t < kCount; ++t) {
      const auto better = sum[t] < sum[0];
      sum[0] = better ? sum[t] : sum[0];
      trials.trial[0].replace(trials.trial[t], better);
    }
  }

 private:
  struct Units {
    F32 one, minus_three_halves;  // A, and -B
  };

  template <bool kMiddling>
  __attribute__((always_inline)) void add_up_by(const Sixteens& x, const Trials<kError>& trials, const RoomScale& tensor) {
    Units units[kCount];
    JLP_UNROLL(3)
    for (int t = 0; t < kCount; ++t) {
      const F32 scale = trials.trial[t].value;
      units[t] = {divided_by_room(scale * tensor.amax), -divided_by_room(scale * 1.5f * tensor.amax)};
      sum[t] = F32{};
    }
    const auto add = [&](auto place) __attribute__((always_inline)) {
      const F32 minus = load<F32>(x.minus[place]);
      sum[0] += error_of<kMiddling, 0>(minus, trials.trial[0], units[0], tensor);
      sum[1] += error_of<kMiddling, 1>(minus, trials.trial[1], units[1], tensor);
      if constexpr (kCount > 2) sum[2] += error_of<kMiddling, 2>(minus, trials.trial[2], units[2], tensor);
    };
    for_each_place(add, std::make_integer_sequence<int, kBlock>());
  }

  /// That of elements made negative, by the t-th scale.
  template <bool kMiddling, int t>
  JLP_RULE F32 error_of(F32 minus, const Trial& trial, const Units& units, const RoomScale& tensor) {
    const F32 y = minus * trial.minus_encode;
    U32 code;
    if constexpr (kMiddling && t == 1)
      code = e2m1_magnitude_bits_to_four(y);
    else
      code = e2m1_magnitude_bits(kMiddling && t == 0 ? y : L::min(y, L::splat(kE2M1Max)));
    F32 d;
    if constexpr (!kMiddling) {
      return nvfp4_error<kError>(-minus, of_code(kE2M1Numbers, code), trial.value, tensor);
    } else if constexpr (kError == ScaleError::kRelativeSquared) {
      d = L::multiply_add_exact(of_code(kE2M1Numbers, code), trial.value, minus * tensor.encode);
    } else {
      const F32 power = of_code(kPowersOfHalves, code);
      d = L::multiply_add_exact(power, by_sign(power, units.one, units.minus_three_halves), minus);
    }
    return kError == ScaleError::kAbsolute ? absolute(d) : d * d;
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
