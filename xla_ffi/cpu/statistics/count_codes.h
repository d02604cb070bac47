// How many elements have each code.
//
// A code's bin is looked up as one bit of two bytes, and bits are added up by place: full adders take sixteen vectors to
// one, whose places alone are counted. Where bytes are not looked up in registers, tables are incremented. Bytes moved: the
// codes, read.
#pragma once

#include <algorithm>

#include "../../problems.h"
#include "../vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

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

}  // namespace JLP_ISA
}  // namespace jaxlowprec
