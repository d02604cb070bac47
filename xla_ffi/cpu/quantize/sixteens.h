// Blocks of NVFP4 side by side: a block in each lane and its 16 elements in as many vectors, for what is added up in the
// order of the elements.
#pragma once

#include "codes.h"

namespace jaxlowprec {
namespace JLP_ISA {

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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
