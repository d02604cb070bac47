// Counts and sums of up to 256 elements of a line beside what their codes decode to.
//
// In one loop over vectors: an element and its code are loaded, the code is decoded in registers, and each lane counts for
// itself. Where a number is not finite, or so large or small that a square leaves float32's range, which is rare, the loop
// runs again and minds that.
// Bytes moved: all that is read is in the cache.
#pragma once

#include <algorithm>

#include "../../numerics/nvfp4.h"
#include "../../problems.h"
#include "../tiles.h"
#include "../vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- Sums and counts that each lane of a vector adds up for itself, and which numbers count.

/// Magnitude bits; 0 for subnormal numbers and for those that are not finite.
JLP_RULE U32 finite_magnitude(F32 v) {
  const U32 bits = magnitude(v);
  return bits >= kMinNormalBits && bits < kInfinityBits ? bits : U32{};
}

/// Subnormal numbers as zeros, in memory too.
JLP_RULE F32 without_subnormals(F32 v) { return L::from_bits(magnitude(v) < kMinNormalBits ? U32{} : L::bits(v)); }

// --- which lanes: g++ makes a vector of every comparison, which AVX-512 need not have
#if defined(JLP_ISA_AVX512)
using Which = __mmask16;
JLP_RULE Which less(U32 a, U32 b) { return _mm512_cmpgt_epi32_mask(raw(b), raw(a)); }  // magnitudes lie below 2^31
JLP_RULE Which equal(U32 a, U32 b) { return _mm512_cmpeq_epi32_mask(raw(a), raw(b)); }
JLP_RULE Which is_zero(U32 v) { return _mm512_cmpeq_epi32_mask(raw(v), _mm512_setzero_si512()); }
JLP_RULE Which not_zero(U32 v) { return _mm512_test_epi32_mask(raw(v), raw(v)); }
JLP_RULE Which both(Which a, Which b) { return static_cast<Which>(a & b); }
JLP_RULE Which either(Which a, Which b) { return static_cast<Which>(a | b); }
JLP_RULE U32 one_more(U32 count, Which where) {
  return (U32)_mm512_mask_sub_epi32(raw(count), where, raw(count), _mm512_set1_epi32(-1));
}
JLP_RULE F32 keep(F32 v, Which where) { return (F32)_mm512_maskz_mov_ps(where, raw(v)); }
JLP_RULE bool any_lane(U32 v) { return not_zero(v) != 0; }
JLP_RULE bool any(Which where) { return where != 0; }
#else
using Which = U32;
JLP_RULE Which less(U32 a, U32 b) { return (U32)(a < b); }
JLP_RULE Which equal(U32 a, U32 b) { return (U32)(a == b); }
JLP_RULE Which is_zero(U32 v) { return (U32)(v == 0); }
JLP_RULE Which not_zero(U32 v) { return (U32)(v != 0); }
JLP_RULE Which both(Which a, Which b) { return a & b; }
JLP_RULE Which either(Which a, Which b) { return a | b; }
JLP_RULE U32 one_more(U32 count, Which where) { return count - where; }
JLP_RULE F32 keep(F32 v, Which where) { return L::from_bits(L::bits(v) & where); }
JLP_RULE bool any_lane(U32 v) {
#if defined(JLP_ISA_AVX2)
  return !_mm256_testz_si256(raw(v), raw(v));
#else
  typedef uint64_t Words __attribute__((vector_size(JLP_VECTOR_BYTES)));
  const Words words = (Words)v;
  return (words[0] | words[1]) != 0;
#endif
}
JLP_RULE bool any(Which where) { return any_lane(where); }
#endif

JLP_RULE uint64_t total(U32 counts) {
  uint64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += counts[i];
  return sum;
}

/// Of float32 vectors, in float64. Flat loops over memory: compilers vectorise them.
struct LanesOfSums {
  alignas(64) double lanes[kLanes] = {};

  void add(F32 v) {
    alignas(64) float of[kLanes];
    store(of, v);
    for (int i = 0; i < kLanes; ++i) lanes[i] += static_cast<double>(of[i]);
  }
  void add_squares(F32 v) {
    alignas(64) float of[kLanes];
    store(of, v);
    for (int i = 0; i < kLanes; ++i) lanes[i] += static_cast<double>(of[i]) * of[i];
  }
  double total() const {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return sum;
  }
};

// --- Codes to numbers, one a lane.

/// The same numbers as e2m1_decode.
JLP_RULE F32 e2m1_values(U32 code) {
#if defined(JLP_ISA_AVX512)
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return (F32)_mm512_permutexvar_ps(raw(code), values);
#else
  return e2m1_decode<F32>(code);
#endif
}

#if defined(JLP_HAVE_HALF_CONVERSION)
/// Of kLanes codes: the float16 that have the sign, exponent and mantissa of each.
template <class Element>
JLP_RULE F32 from_half_of_same_bits(const uint8_t* codes) {
  constexpr int kShift = 10 - Element::kMantissaBits;
  constexpr int16_t kMask = static_cast<int16_t>(0x8000 | 0x7F << kShift);
#if defined(JLP_ISA_AVX512)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(codes)), kShift);
  return from_half(_mm256_and_si256(wide, _mm256_set1_epi16(kMask)));
#else
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(eight), kShift);
  return from_half(_mm_and_si128(wide, _mm_set1_epi16(kMask)));
#endif
}
#endif

/// What decodes codes by scales, one or one a lane. `plain` is the same where no result is infinite or NaN.
template <bool kTwoLevel>
struct DecodeE2M1 {
  static constexpr uint32_t kLargest = E2M1::kLargestCode, kMagnitude = 7;
  float amax;
  template <class Scale>
  F32 operator()(U32 code, Scale scale) const {
    const F32 relative = e2m1_values(code) * scale;
    return kTwoLevel ? nvfp4_value(relative, amax) : L::flush(relative);
  }
  F32 plain(const uint8_t* codes, float scale) const { return (*this)(load_u8(codes), scale); }
  bool any_nan(const uint8_t*, int) const { return false; }
};

template <class Element>
struct DecodeFloat8 {
  static constexpr uint32_t kLargest = Element::kLargestCode, kMagnitude = 0x7F;
  template <class Scale>
  F32 operator()(U32 code, Scale scale) const {
    return L::flush(float8_decode<Element, F32>(code) * scale);
  }
  F32 plain(const uint8_t* codes, float scale) const {
#if defined(JLP_HAVE_HALF_CONVERSION)
    constexpr float kUnit = detail::two_to(15 - Element::kBias);  // float16 of the same exponent and mantissa bits
    return from_half_of_same_bits<Element>(codes) * (scale * kUnit);
#else
    return (*this)(load_u8(codes), scale);
#endif
  }
  /// Whether a code is NaN that `plain` takes for a number; count: of whole vectors.
  bool any_nan(const uint8_t* codes, int count) const {
    U8 found = U8{};
    for (int i = 0; Element::kSpecial == Special::kNaN && i < count; i += static_cast<int>(sizeof found))
      found |= (U8)((load<U8>(codes + i) & kFloat8NaN) == kFloat8NaN);
    return any_lane((U32)found);
  }
};

/// Calls visit with what decodes the format's codes.
template <class Visit>
void with_decoder(const Format& f, const float* amax, Visit visit) {
  if (!f.packed()) return with_float8(f.code, [&](auto element) { visit(DecodeFloat8<decltype(element)>{}); });
  if (amax) return visit(DecodeE2M1<true>{*amax});
  visit(DecodeE2M1<false>{0});
}

// --- How many elements have each code.
//
// A code's bin is looked up as one bit of two bytes, and bits are added up by place: full adders take sixteen vectors to
// one, whose places alone are counted. Where bytes are not looked up in registers, tables are incremented. Bytes moved: the
// codes, read.

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)

#if defined(JLP_ISA_AVX512)
/// One bit in each place of sum, a and b added up: what is carried; the lower bit is left in sum.
JLP_RULE U8 add_bits(U8& sum, U8 a, U8 b) {
  const __m512i x = (__m512i)sum, y = (__m512i)a, z = (__m512i)b;
  sum = (U8)_mm512_ternarylogic_epi32(x, y, z, 0x96);
  return (U8)_mm512_ternarylogic_epi32(x, y, z, 0xE8);
}
/// The entry of 16 for each byte; 0 where the byte's upper bit is set.
JLP_RULE U8 look_up_bytes(Bytes16 table, U8 index) {
  return (U8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)index);
}
#else
JLP_RULE U8 add_bits(U8& sum, U8 a, U8 b) {
  const U8 either = sum ^ a, carried = (sum & a) | (either & b);
  sum = either ^ b;
  return carried;
}
JLP_RULE U8 look_up_bytes(Bytes16 table, U8 index) {
  return (U8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)index);
}
#endif

/// Bit b of all bytes, as numbers.
JLP_RULE U8 bit(U8 bytes, int b) { return (U8)((U16)bytes >> b) & 1; }

/// How often each of eight bits is set.
struct BitCounts {
  static constexpr int kPlanes = 4, kVectors = 1 << kPlanes;
  U8 planes[kPlanes] = {};  // of a sum of bits in each place
  U8 sixteens[8] = {};

  /// Of 16 vectors, vector(i). At most 255 times.
  template <class Vector>
  JLP_RULE void add(BitCounts& counts, Vector vector) {
    const U8 carried = carry<kPlanes - 1>(counts.planes, 0, vector);
    JLP_UNROLL(8)
    for (int b = 0; b < 8; ++b) counts.sixteens[b] += bit(carried, b);
  }
  void add_to(uint64_t (&total)[8]) const {
    for (int b = 0; b < 8; ++b) {
      U8 rest = U8{};
      for (int plane = kPlanes; plane-- > 0;) rest += rest + bit(planes[plane], b);
      for (size_t i = 0; i < sizeof rest; ++i) total[b] += uint64_t{rest[i]} + kVectors * uint64_t{sixteens[b][i]};
    }
  }

 private:
  template <int kPlane, class Vector>
  JLP_RULE U8 carry(U8 (&planes)[kPlanes], int first, Vector vector) {
    if constexpr (kPlane < 0) {
      return vector(first);
    } else {
      const U8 a = carry<kPlane - 1>(planes, first, vector);
      const U8 b = carry<kPlane - 1>(planes, first + (1 << kPlane), vector);
      return add_bits(planes[kPlane], a, b);
    }
  }
};

/// Of vectors of bytes whose bins are below 16, vector(i): those of some vectors at a time, until few are left.
template <int kBytesEach, class Bins>
int64_t count_bins(const uint8_t* codes, int64_t bytes, Bins bins, uint64_t* counts) {
  constexpr Bytes16 kFirst = {1, 2, 4, 8, 16, 32, 64, 128}, kSecond = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128};
  constexpr int64_t kStep = BitCounts::kVectors * kBytesEach;
  int64_t at = 0;
  while (at + kStep <= bytes) {
    BitCounts first, second;
    for (int step = 0; step < 255 && at + kStep <= bytes; ++step, at += kStep) {
      BitCounts::add(first, [&](int i) { return look_up_bytes(kFirst, bins(codes + at, i)); });
      BitCounts::add(second, [&](int i) { return look_up_bytes(kSecond, bins(codes + at, i)); });
    }
    uint64_t found[2][8] = {};
    first.add_to(found[0]), second.add_to(found[1]);
    for (int bin = 0; bin < 16; ++bin) counts[bin] += found[bin / 8][bin % 8];
  }
  return at;
}

/// Of codes from the start on: how many bytes were counted.
inline int64_t count_vectors(const Format& f, const uint8_t* codes, int64_t bytes, uint64_t* counts) {
  constexpr int kBytes = sizeof(U8);
  if (f.packed()) {
    const auto nibbles = [](const uint8_t* at, int i) {
      const U8 two = load<U8>(at + i / 2 * kBytes);
      return (i % 2 ? (U8)((U16)two >> 4) : two) & 15;
    };
    return count_bins<kBytes / 2>(codes, bytes, nibbles, counts);
  }
  return with_float8(f.code, [&](auto element) {
    constexpr int kShift = decltype(element)::kMantissaBits, kLargest = 0x7F >> kShift;
    const auto exponent = [](const uint8_t* at, int i) {
      return (U8)((U16)load<U8>(at + i * kBytes) >> kShift) & static_cast<uint8_t>(kLargest);
    };
    if constexpr (kLargest < 16) {
      return count_bins<kBytes>(codes, bytes, exponent, counts);
    } else {  // what is in the other half looks up 0
      const auto lower = [&](const uint8_t* at, int i) { return exponent(at, i) + (0x80 - 16); };
      const auto upper = [&](const uint8_t* at, int i) { return exponent(at, i) - 16; };
      count_bins<kBytes>(codes, bytes, upper, counts + 16);
      return count_bins<kBytes>(codes, bytes, lower, counts);
    }
  });
}

#else

inline int64_t count_vectors(const Format&, const uint8_t*, int64_t, uint64_t*) { return 0; }

#endif

/// Adds the elements by their code's bin, zeros that fill bytes included.
inline void count_codes(const Format& f, const uint8_t* codes, int64_t bytes, uint64_t* counts) {
  int64_t i = count_vectors(f, codes, bytes, counts);
  uint32_t found[4][256] = {};  // by turns: neighbours are often alike
  while (i < bytes) {
    const int64_t end = std::min<int64_t>(bytes, i + 4);
    for (int j = 0; i < end; ++i, ++j) ++found[j][codes[i]];
  }
  const int shift = f.packed() ? 0 : with_float8(f.code, [](auto element) { return decltype(element)::kMantissaBits; });
  for (int byte = 0; byte < 256; ++byte) {
    const uint64_t count = uint64_t{found[0][byte]} + found[1][byte] + found[2][byte] + found[3][byte];
    if (f.packed()) {
      counts[byte & 15] += count, counts[byte >> 4] += count;
    } else {
      counts[(byte & 0x7F) >> shift] += count;
    }
  }
}

/// What is counted: elements of a line as float32, zeros behind them; their codes; and the scale of every 16.
struct Line {
  static constexpr int kLength = 256, kBlocks = kLength / kBlock;
  int length;  // that exist
  const float* x;
  const uint8_t* codes;                   // one a byte, zeros behind them
  alignas(64) uint8_t buffer[kLength];    // of codes
  alignas(64) float scales[kBlocks];      // zeros behind them
  alignas(64) uint32_t largest[kBlocks];  // magnitude of a block's largest code; that of infinity where it is 0
  uint32_t used;                          // found: a bit for each 16 that has finite elements which are not zero
};

/// Sums of which each lane has its own.
struct ElementSums {
  LanesOfSums error, magnitude, square_error, energy;

  void add(F32 off, F32 magnitudes, F32 squares, F32 energies) {
    error.add(off), magnitude.add(magnitudes), square_error.add(squares), energy.add(energies);
  }
};

/// The counts and sums of a part. No lane counts 2^32 elements.
struct Counted {
  uint64_t elements = 0;
  U32 numbers = U32{}, underflow = U32{}, saturation = U32{}, nonfinite = U32{}, poisoned = U32{};  // numbers: not zeros
  U32 runs = U32{};
  LanesOfSums ranges;
  ElementSums plain, in_units;
  uint32_t scales[4][kSumsScales] = {};  // by turns: neighbours are often alike
  uint64_t codes[kSumsCodes] = {};

  void store(double unit, float* result) const {
    std::fill_n(result, kSums, 0.0f);
    const double found[] = {double(elements),
                            double(elements - total(numbers)),
                            double(total(underflow)),
                            double(total(saturation)),
                            double(total(nonfinite)),
                            double(total(poisoned)),
                            unit * plain.error.total() + in_units.error.total(),
                            unit * plain.magnitude.total() + in_units.magnitude.total(),
                            unit * unit * plain.square_error.total() + in_units.square_error.total(),
                            unit * unit * plain.energy.total() + in_units.energy.total(),
                            ranges.total(),
                            double(total(runs))};
    for (size_t i = 0; i < sizeof found / sizeof *found; ++i) result[i] = static_cast<float>(found[i]);
    for (int i = 0; i < kSumsScales; ++i)
      result[kSumsScalesFrom + i] = static_cast<float>(uint64_t{scales[0][i]} + scales[1][i] + scales[2][i] + scales[3][i]);
    for (int i = 0; i < kSumsCodes; ++i) result[kSumsCodesFrom + i] = static_cast<float>(codes[i]);
  }
};

/// False, and nothing counted, where a number is out of the ordinary.
template <class Decode>
__attribute__((noinline)) bool count_plain(Line& line, const Decode& decode, Counted& counted) {
  constexpr float kLeast = detail::two_to(-80), kMost = detail::two_to(100);
  if (decode.any_nan(line.codes, Line::kLength)) return false;
  U32 numbers = counted.numbers, underflow = counted.underflow, saturation = counted.saturation;
  F32 error = F32{}, magnitudes = F32{}, square_error = F32{}, energy = F32{};
  line.used = 0;
  const int blocks = static_cast<int>(divide_up(line.length, kBlock));
  for (int block = 0; block < blocks; ++block) {
    const U32 largest = fill<F32>(line.largest[block]);
    Which used = Which{};
    for (int k = block * kBlock; k < (block + 1) * kBlock; k += kLanes) {
      const F32 v = load<F32>(line.x + k);
      const F32 d = decode.plain(line.codes + k, line.scales[block]), off = d - v;
      const U32 size = magnitude(v), decoded = magnitude(d);
      const Which number = less(fill<F32>(kMinNormalBits - 1), size);
      used = either(used, number);
      numbers = one_more(numbers, number);
      underflow = one_more(underflow, both(number, is_zero(decoded)));
      saturation = one_more(saturation, both(less(largest, size), equal(decoded, largest)));
      error += off, magnitudes += L::from_bits(size);
      square_error = L::multiply_add_exact(off, off, square_error);  // exact or not: sums are rounded anyway
      energy = L::multiply_add_exact(v, v, energy);
    }
    line.used |= uint32_t{any(used)} << block;
  }
  if (!all_below(energy + square_error, kMost)) return false;
  const bool nothing = line.used == 0 && !any_lane(L::bits(error) | L::bits(square_error));
  if (all_below(energy, kLeast) && !nothing) return false;
  counted.numbers = numbers, counted.underflow = underflow, counted.saturation = saturation;
  counted.plain.add(error, magnitudes, square_error, energy);
  return true;
}

template <class Decode>
__attribute__((noinline)) void count_carefully(Line& line, const Decode& decode, float unit, Counted& counted) {
  F32 error = F32{}, magnitudes = F32{}, square_error = F32{}, energy = F32{};
  line.used = 0;
  const U32 infinity = fill<F32>(kInfinityBits);
  for (int k = 0; k < line.length; k += kLanes) {
    const F32 v = without_subnormals(load<F32>(line.x + k));
    const U32 code = load_u8(line.codes + k);
    F32 d = decode(code, line.scales[k / kBlock]);
    if (k + kLanes > line.length)
      for (int i = 0; i < kLanes; ++i) d[i] = k + i < line.length ? d[i] : 0.0f;  // not 0 by a scale of NaN
    const U32 size = magnitude(v), decoded = magnitude(d);
    const Which finite = less(size, infinity), known = both(finite, less(decoded, infinity));
    const Which largest = equal(code & Decode::kMagnitude, fill<F32>(Decode::kLargest));
    const F32 kept = keep(v * unit, known), off = keep(d * unit - v * unit, known);
    counted.numbers = one_more(counted.numbers, not_zero(size));
    counted.nonfinite = one_more(counted.nonfinite, less(infinity - 1u, size));
    counted.poisoned = one_more(counted.poisoned, both(finite, less(infinity - 1u, decoded)));
    counted.underflow = one_more(counted.underflow, both(not_zero(size), is_zero(decoded)));
    counted.saturation =
        one_more(counted.saturation, both(both(known, largest), both(less(decoded, size), not_zero(decoded))));
    error += off, magnitudes += absolute(kept), square_error += off * off, energy += kept * kept;
    line.used |= uint32_t{any(both(finite, not_zero(size)))} << k / kBlock;
  }
  counted.in_units.add(error, magnitudes, square_error, energy);
}

/// Of a line whose `codes` and `scales` are there.
inline void count_line(const Format& f, const float* amax, float unit, Line& line, Counted& counted) {
  with_decoder(f, amax, [&](const auto& decode) {
    for (int i = 0; i < Line::kBlocks; i += kLanes) {
      const F32 largest = decode(fill<F32>(decode.kLargest), load<F32>(line.scales + i));
      store(line.largest + i, magnitude(largest) == 0 ? fill<F32>(kInfinityBits) : magnitude(largest));
    }
    counted.elements += line.length;
    if (!count_plain(line, decode, counted)) count_carefully(line, decode, unit, counted);
  });
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
