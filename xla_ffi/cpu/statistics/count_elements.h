// Counts and sums of up to 256 elements of a line beside what their codes decode to.
//
// In one loop over vectors: an element and its code are loaded, the code is decoded in registers, and each lane counts for
// itself. Where a number was not finite, which is rare, the loop runs again and minds that. Code bytes are counted apart, in
// four tables by turns.
// Bytes moved: all that is read is in the cache.
#pragma once

#include "../../numerics/nvfp4.h"
#include "../tiles.h"
#include "lanes_of_sums.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// What is counted: elements of a line as float32, zeros behind them; their codes; and the scale of every 16.
struct Line {
  static constexpr int kLength = 256, kBlocks = kLength / kBlock;
  int length;  // that exist
  const float* x;
  alignas(64) uint8_t bytes[kLength];  // of codes, zeros behind them
  alignas(64) uint8_t codes[kLength];  // one a byte
  float scales[kBlocks];
  uint32_t used;  // found: a bit for each 16 that has finite elements which are not zero
};

/// Whether bins of two codes are counted as one byte: a table's entry takes as long for two.
inline bool in_pairs(const Format& f) { return f.packed() || f.code == CodeType::kE4M3; }

/// The counts and sums of a part.
struct Counted {
  uint64_t elements = 0, padded = 0, runs = 0;
  double ranges = 0;
  LanesOfCounts zeros, underflow, saturation, nonfinite, poisoned;
  LanesOfSums error, magnitude, square_error, energy;
  uint32_t scales[kSumsScales] = {};
  uint32_t bytes[4][256] = {};  // of codes or pairs of bins, by turns: neighbours are often alike
  uint64_t padded_codes = 0;    // zeros among them, behind a line

  void store(const Format& format, float* result) const {
    std::fill_n(result, kSums, 0.0f);
    const double numbers[] = {double(elements),
                              double(zeros.total() - padded),
                              double(underflow.total()),
                              double(saturation.total()),
                              double(nonfinite.total()),
                              double(poisoned.total()),
                              error.total(),
                              magnitude.total(),
                              square_error.total(),
                              energy.total(),
                              ranges,
                              double(runs)};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) result[i] = static_cast<float>(numbers[i]);
    for (int i = 0; i < kSumsScales; ++i) result[kSumsScalesFrom + i] = static_cast<float>(scales[i]);
    uint64_t codes[kSumsCodes] = {};
    for (int byte = 0; byte < 256; ++byte) {
      const uint64_t count = uint64_t{bytes[0][byte]} + bytes[1][byte] + bytes[2][byte] + bytes[3][byte];
      if (in_pairs(format)) {
        codes[byte & 15] += count, codes[byte >> 4] += count;
      } else {
        with_float8(format.code, [&](auto element) { codes[(byte & 0x7F) >> decltype(element)::kMantissaBits] += count; });
      }
    }
    codes[0] -= padded_codes;
    for (int i = 0; i < kSumsCodes; ++i) result[kSumsCodesFrom + i] = static_cast<float>(codes[i]);
  }
};

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

template <bool kTwoLevel>
struct DecodeE2M1 {
  static constexpr uint32_t kLargest = E2M1::kLargestCode, kMagnitude = 7;
  float amax;
  F32 operator()(U32 code, float scale) const {
    const F32 relative = e2m1_values(code) * scale;
    return kTwoLevel ? nvfp4_value(relative, amax) : L::flush(relative);
  }
};

template <class Element>
struct DecodeFloat8 {
  static constexpr uint32_t kLargest = Element::kLargestCode, kMagnitude = 0x7F;
  F32 operator()(U32 code, float scale) const { return L::flush(float8_decode<Element, F32>(code) * scale); }
};

/// Calls visit with what decodes the format's codes.
template <class Visit>
void with_decoder(const Format& f, const float* amax, Visit visit) {
  if (!f.packed()) return with_float8(f.code, [&](auto element) { visit(DecodeFloat8<decltype(element)>{}); });
  if (amax) return visit(DecodeE2M1<true>{*amax});
  visit(DecodeE2M1<false>{0});
}

/// One byte a code from two.
inline void unpack_codes(Line& line) {
  for (int b = 0; b < Line::kLength / 2; b += 16) {
    const Bytes16 two = load<Bytes16>(line.bytes + b), low = two & 15, high = two >> 4;
    store(line.codes + 2 * b, interleave_low_bytes(low, high));
    store(line.codes + 2 * b + 16, interleave_high_bytes(low, high));
  }
}

inline void count_codes(const Format& f, const Line& line, Counted& counted) {
  const uint8_t* counts = line.bytes;
  int bytes = f.packed() ? (line.length + 1) / 2 : line.length;
  counted.padded_codes += f.packed() ? line.length % 2 : 0;
  alignas(64) uint8_t pairs[Line::kLength / 2];
  if (f.code == CodeType::kE4M3) {
    bytes = Line::kLength / 2, counted.padded_codes += Line::kLength - line.length;
    for (int i = 0; i < bytes; ++i) {
      const uint8_t low = (line.bytes[i] & 0x7F) >> E4M3::kMantissaBits, high = line.bytes[i + bytes] & 0x78;
      pairs[i] = static_cast<uint8_t>(low | high << 1);
    }
    counts = pairs;
  }
  int i = 0;
  for (; i + 8 <= bytes; i += 8) {
    const uint64_t eight = load<uint64_t>(counts + i);
    for (int j = 0; j < 8; ++j) ++counted.bytes[j % 4][eight >> (8 * j) & 0xFF];
  }
  for (; i < bytes; ++i) ++counted.bytes[0][counts[i]];
}

/// False, and nothing counted, where kFinite and a number is not.
template <bool kFinite, class Decode>
__attribute__((noinline)) bool try_to_count(Line& line, const Decode& decode, float unit, Counted& counted) {
  U32 zeros = U32{}, underflow = U32{}, saturation = U32{}, nonfinite = U32{}, poisoned = U32{}, most = U32{};
  F32 error = F32{}, magnitudes = F32{}, square_error = F32{}, energy = F32{};
  line.used = 0;
  const int blocks = static_cast<int>(divide_up(line.length, kBlock));
  for (int block = 0; block < blocks; ++block) {
    U32 used = U32{};
    for (int k = block * kBlock; k < (block + 1) * kBlock; k += kLanes) {
      const F32 v = load<F32>(line.x + k);
      const U32 code = load_u8((Decode::kMagnitude == 7 ? line.codes : line.bytes) + k);
      F32 d = decode(code, line.scales[block]);
      if (__builtin_expect(k + kLanes > line.length, 0))
        for (int i = 0; i < kLanes; ++i) d[i] = k + i < line.length ? d[i] : 0.0f;  // not 0 by a scale of NaN
      const U32 size = magnitude(v), decoded = magnitude(d);
      F32 kept = v * unit, off = d * unit - kept;
      Which cut_off =
          both(both(equal(code & Decode::kMagnitude, fill<F32>(Decode::kLargest)), less(decoded, size)), not_zero(decoded));
      if constexpr (kFinite) {
        most = max_magnitude(most, max_magnitude(size, decoded)), used |= size;
      } else {
        const U32 infinity = fill<F32>(kInfinityBits);
        const Which finite = less(size, infinity), known = both(finite, less(decoded, infinity));
        nonfinite = one_more(nonfinite, less(infinity - 1u, size));
        poisoned = one_more(poisoned, both(finite, less(infinity - 1u, decoded)));
        kept = keep(kept, known), off = keep(off, known), cut_off = both(cut_off, known);
        used |= L::bits(keep(L::from_bits(size), finite));
      }
      zeros = one_more(zeros, is_zero(size));
      underflow = one_more(underflow, both(not_zero(size), is_zero(decoded)));
      saturation = one_more(saturation, cut_off);
      error += off, magnitudes += absolute(kept), square_error += off * off, energy += kept * kept;
    }
    line.used |= uint32_t{any_lane(used)} << block;
  }
  if (kFinite && max_lane(most) >= kInfinityBits) return false;
  counted.elements += line.length, counted.padded += blocks * kBlock - line.length;
  counted.zeros.add(zeros), counted.underflow.add(underflow), counted.saturation.add(saturation);
  if (!kFinite) counted.nonfinite.add(nonfinite), counted.poisoned.add(poisoned);
  counted.error.add(error), counted.magnitude.add(magnitudes);
  counted.square_error.add(square_error), counted.energy.add(energy);
  return true;
}

/// Of a line whose `bytes` and `scales` are there.
inline void count_line(const Format& f, const float* amax, float unit, Line& line, Counted& counted) {
  if (f.packed()) unpack_codes(line);
  count_codes(f, line, counted);
  with_decoder(f, amax, [&](const auto& decode) {
    if (!try_to_count<true>(line, decode, unit, counted)) try_to_count<false>(line, decode, unit, counted);
  });
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
