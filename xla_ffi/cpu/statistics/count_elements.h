// Counts and sums of up to 256 elements of a line beside what their codes decode to.
//
// In one loop over vectors: an element and its code are loaded, the code is decoded in registers, and each lane counts for
// itself. Where a number is not finite, or so large or small that a square leaves float32's range, which is rare, the loop
// runs again and minds that.
// Bytes moved: all that is read is in the cache.
#pragma once

#include "../tiles.h"
#include "count_codes.h"
#include "decode_codes.h"
#include "lanes_of_sums.h"

namespace jaxlowprec {
namespace JLP_ISA {

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
