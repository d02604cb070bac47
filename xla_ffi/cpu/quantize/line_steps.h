// 8-bit float codes of a line of bfloat16 elements without a division each (numerics.md 18). Within a binade a line's code
// is a step function of 128 mantissas, the same for all binades but for a constant, and 8 mantissas in a row have one step
// at most: 16 numbers say where. They are made of the codes that the rule gives these 128.
#pragma once

#include "codes.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Where there is no such way.
template <class E, class Element, bool kStochastic>
struct LineSteps {
  template <class Rule>
  LineSteps(float, Rule) {}
  bool encode(const typename E::Storage*, U8&) const { return false; }
};

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
template <class Element>
class StepsOfBinade {
 public:
  /// `rule(x)`: the codes of 4 * kLanes elements of a line of this scale.
  template <class Rule>
  StepsOfBinade(float scale, Rule rule) {
    constexpr uint64_t kOnes = 0x0101010101010101u;
    constexpr int kMantissas = 128;
    const int exponent = static_cast<int>(Lanes<float>::bits(scale) >> 23), binade = (exponent + 2) << 7;
    if (exponent < 32 || exponent > 250) return;  // sums might leave 16 bits, and the binade float32
    alignas(64) uint16_t x[kMantissas];           // from 2 to 8 scales: normal codes, and none saturates
    alignas(64) uint8_t codes[kMantissas];
    for (int i = 0; i < kMantissas; ++i) x[i] = static_cast<uint16_t>(binade + i);
    for (int i = 0; i < kMantissas; i += 4 * kLanes) store(codes + i, rule(x + i));
    int add[kMantissas / 8];
    uint64_t others = 0;
    for (int b = 0; b < kMantissas / 8; ++b) {
      const uint64_t eight = load<uint64_t>(codes + 8 * b), steps = eight - (eight & 0xFF) * kOnes;
      others |= steps & ~kOnes;
      add[b] = (static_cast<int>(eight & 0xFF) << kShift) + (1 << kShift) - 8 - 8 * b +
               static_cast<int>((steps & kOnes) * kOnes >> 56) - binade;
    }
    set(add);
    beyond_ = static_cast<uint16_t>(((exponent + 2 - Element::kBias) << 7) - 1);
    usable_ = others == 0;
  }

  /// Codes of 4 * kLanes elements, saturating. False, and none, if the code of one is not normal and the element not 0.
  __attribute__((always_inline)) bool encode(const uint16_t* x, U8& codes) const {
    const U16 low = load<U16>(x), high = load<U16>(x + 2 * kLanes), a = low & 0x7FFF, b = high & 0x7FFF;
    if (__builtin_expect(!usable_ || any_below(a - 1, b - 1), 0)) return false;
    const I16 first = (I16)(a + added(low)) >> kShift, second = (I16)(b + added(high)) >> kShift;  // of 0: negative
    const U8 magnitudes = narrow(first, second, Element::kLargestCode);
    codes = halves_in_order(magnitudes | (signs(low, high) & (U8)(magnitudes != 0)));
    return true;
  }

 private:
  static constexpr int kShift = 7 - Element::kMantissaBits;

#if defined(JLP_ISA_AVX512)
  alignas(64) int16_t add_[32];  // by the low 5 bits of x >> 3: x + add_ is the code << kShift
  void set(const int (&add)[16]) {
    for (int b = 0; b < 16; ++b) add_[b] = add_[b + 16] = static_cast<int16_t>(add[b]);
  }
  U16 added(U16 x) const { return (U16)_mm512_permutexvar_epi16((__m512i)(x >> 3), load<__m512i>(add_)); }
  bool any_below(U16 a, U16 b) const {
    const __m512i below =
        _mm512_subs_epu16(_mm512_set1_epi16(static_cast<int16_t>(beyond_)), _mm512_min_epu16((__m512i)a, (__m512i)b));
    return _mm512_test_epi32_mask(below, below) != 0;
  }
  JLP_RULE U8 narrow(I16 low, I16 high, int most) {
    return (U8)_mm512_min_epu8(_mm512_packus_epi16((__m512i)low, (__m512i)high), _mm512_set1_epi8(static_cast<char>(most)));
  }
  JLP_RULE U8 signs(U16 low, U16 high) { return (U8)_mm512_packs_epi16((__m512i)low, (__m512i)high) & 0x80; }
#else
  static constexpr int kMiddle = 64;  // the 16 numbers differ by less
  alignas(32) uint8_t add_[32];  // by the low 4 bits of x >> 3, and kMiddle for 0: x + add_ + offset_ is the code << kShift
  uint16_t offset_;
  void set(const int (&add)[16]) {
    for (int b = 0; b < 16; ++b) add_[b] = add_[b + 16] = static_cast<uint8_t>(add[b] - add[0] + kMiddle);
    offset_ = static_cast<uint16_t>(add[0] - kMiddle - (kMiddle << 8));  // the upper byte is looked up too: 0's
  }
  U16 added(U16 x) const { return (U16)_mm256_shuffle_epi8(load<__m256i>(add_), (__m256i)((x >> 3) & 15)) + offset_; }
  bool any_below(U16 a, U16 b) const {
    const __m256i below =
        _mm256_subs_epu16(_mm256_set1_epi16(static_cast<int16_t>(beyond_)), _mm256_min_epu16((__m256i)a, (__m256i)b));
    return !_mm256_testz_si256(below, below);
  }
  JLP_RULE U8 narrow(I16 low, I16 high, int most) {
    return (U8)_mm256_min_epu8(_mm256_packus_epi16((__m256i)low, (__m256i)high), _mm256_set1_epi8(static_cast<char>(most)));
  }
  JLP_RULE U8 signs(U16 low, U16 high) { return (U8)_mm256_packs_epi16((__m256i)low, (__m256i)high) & 0x80; }
#endif

  uint16_t beyond_;  // magnitudes from 1 to this may have no normal code
  bool usable_ = false;
};

template <>
struct LineSteps<BF16, E4M3, false> : StepsOfBinade<E4M3> {
  using StepsOfBinade::StepsOfBinade;
};
template <>
struct LineSteps<BF16, E5M2, false> : StepsOfBinade<E5M2> {
  using StepsOfBinade::StepsOfBinade;
};
#endif

}  // namespace JLP_ISA
}  // namespace jaxlowprec
