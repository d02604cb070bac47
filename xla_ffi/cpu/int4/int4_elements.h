// Element types for the Int4 kernels: elements two vectors at a time, in the order that suits the type, and the largest
// elements of either sign by integer comparison, which needs no conversion to float32 and orders NaN.
#pragma once

#include "../../numerics/int4.h"
#include "../quantize/codes.h"
#include "../quantize/lines.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- How a matrix quantised along its columns is cut into tiles.

constexpr int kStrip = 128;  // columns of a tile

/// How a matrix quantised along its columns is cut into tiles of whole groups by kStrip columns. A line whose groups share
/// bytes is one tile's.
struct Int4Tiles {
  int64_t rows_each, strips, tiles;

  /// `strip`: columns of a tile.
  Int4Tiles(const Int4Matrices& m, bool packed, int64_t strip = kStrip) {
    const int64_t group = m.format.group;
    const bool shared = packed && group % 2;
    rows_each = shared ? std::max<int64_t>(m.groups(), 1) * group : std::max<int64_t>(1, (packed ? 128 : 1) / group) * group;
    strips = divide_up(m.columns, strip);
    tiles = strips * divide_up(m.rows, rows_each);
  }
};

/// One of them, as far as it lies in the matrix.
struct Int4Tile {
  int64_t row, column, rows, columns;

  Int4Tile(const Int4Matrices& m, const Int4Tiles& tiles, int64_t chunk, int64_t strip = kStrip) {
    row = chunk / tiles.strips * tiles.rows_each, column = chunk % tiles.strips * strip;
    rows = std::min(tiles.rows_each, m.rows - row), columns = std::min<int64_t>(strip, m.columns - column);
  }
  bool whole(const Int4Matrices& m) const {
    return columns == kStrip && rows % m.format.group == 0 && m.format.group % 32 == 0;
  }
};

/// 16 bytes of each line of a strip to as many rows of codes. Not inlined: every type of elements shares it.
__attribute__((noinline)) static void lines_to_codes(const uint8_t* lines, int64_t line_bytes, uint8_t (*codes)[kStrip]) {
  for (int j = 0; j < kStrip; j += 16) transpose_bytes(lines + j * line_bytes, line_bytes, &codes[0][j], kStrip);
}

constexpr int kStep = 2 * kLanes;  // elements handled at once

struct DeployBF16 : Int4BF16 {
  JLP_RULE F32 round(F32 x) { return BF16::round_finite(x); }
};

/// float16 as a deployment dtype, converted by the processor where it can.
struct DeployF16 : Int4F16 {
#if defined(JLP_HAVE_HALF_CONVERSION)
  template <class F>
  JLP_RULE Uint<F> finite_bits(F x) {
    const auto half = to_half(x);
    return load_u16(&half);
  }
  JLP_RULE F32 round(F32 x) { return from_half(to_half(x)); }
#else
  JLP_RULE F32 round(F32 x) { return F16::round(x); }
#endif
};

/// A vector whose elements are of 32 bits, each a number of its own, or of 16, two in each lane.
struct Halves {
  static constexpr int kVectors = 1;  // that hold kStep elements
  static constexpr uint32_t kSign = 0x80008000u;
  JLP_RULE U32 larger(U32 a, U32 b) { return max_halves(a, b); }
  /// The largest of each lane.
  JLP_RULE U32 fold(const U32 (&v)[1]) { return max_magnitude(v[0] & 0xFFFFu, v[0] >> 16); }
};

template <class E>
struct Int4Elements;

template <>
struct Int4Elements<BF16> : Halves {
  using Deploy = DeployBF16;
  JLP_RULE F32 load_lanes(const uint16_t* p) { return BF16::load_lanes(p); }
  JLP_RULE Pair load_two(const uint16_t* p) { return BF16::load_pair(p); }  // even and odd
  JLP_RULE Pair load_pair(const uint16_t* p) { return BF16::load_pair(p); }
  JLP_RULE void store_two(uint16_t* p, U32 a, U32 b) { store(p, a | (b << 16)); }
  JLP_RULE void store_two_bytes(uint8_t* p, U32 a, U32 b) { store_u16(p, a | (b << 8)); }
  JLP_RULE void load_two_bytes(const uint8_t* p, U32& a, U32& b) {
    const U32 both = load_u16(p);
    a = both & 0xFFu, b = both >> 8;
  }
  JLP_RULE U32 float_bits(U32 element) { return element << 16; }
  JLP_RULE void two_float_bits(const U32 (&v)[1], U32& a, U32& b) { a = v[0] << 16, b = v[0] & 0xFFFF0000u; }
};

template <>
struct Int4Elements<F16> : Halves {
  using Deploy = DeployF16;
  JLP_RULE F32 load_lanes(const uint16_t* p) {
#if defined(JLP_ISA_AVX512)
    return from_half(load<__m256i>(p));
#elif defined(JLP_ISA_AVX2)
    return from_half(load<__m128i>(p));
#else
    return F16::load_lanes(p);
#endif
  }
  JLP_RULE Pair load_two(const uint16_t* p) { return {load_lanes(p), load_lanes(p + kLanes)}; }
  JLP_RULE Pair load_pair(const uint16_t* p) {
    const Pair two = load_two(p);
    return {shuffle<EvenLanes>(two.even, two.odd), shuffle<OddLanes>(two.even, two.odd)};
  }
  JLP_RULE void store_two(uint16_t* p, U32 a, U32 b) { store_u16(p, a), store_u16(p + kLanes, b); }
  JLP_RULE void store_two_bytes(uint8_t* p, U32 a, U32 b) { store_low_bytes(p, a), store_low_bytes(p + kLanes, b); }
  JLP_RULE void load_two_bytes(const uint8_t* p, U32& a, U32& b) { a = load_u8(p), b = load_u8(p + kLanes); }
  JLP_RULE U32 float_bits(U32 element) { return L::bits(f16_decode<F32>(element)); }
  JLP_RULE void two_float_bits(const U32 (&v)[1], U32& a, U32& b) {
    uint16_t elements[kStep];
    store(elements, v[0]);
    a = float_bits(load_u16(elements)), b = float_bits(load_u16(elements + kLanes));
  }
};

template <>
struct Int4Elements<Float> {
  using Deploy = void;
  static constexpr int kVectors = 2;
  static constexpr uint32_t kSign = kSignBit;
  JLP_RULE U32 larger(U32 a, U32 b) { return max_magnitude(a, b); }
  JLP_RULE U32 fold(const U32 (&v)[2]) { return max_magnitude(v[0], v[1]); }
  JLP_RULE Pair load_two(const float* p) { return {load<F32>(p), load<F32>(p + kLanes)}; }
  JLP_RULE Pair load_pair(const float* p) { return Float::load_pair(p); }
  JLP_RULE void store_two(float* p, F32 a, F32 b) { store(p, a), store(p + kLanes, b); }
  JLP_RULE void store_two_bytes(uint8_t* p, U32 a, U32 b) { store_low_bytes(p, a), store_low_bytes(p + kLanes, b); }
  JLP_RULE void load_two_bytes(const uint8_t* p, U32& a, U32& b) { a = load_u8(p), b = load_u8(p + kLanes); }
  JLP_RULE U32 float_bits(U32 element) { return element; }
  JLP_RULE void two_float_bits(const U32 (&v)[2], U32& a, U32& b) { a = v[0], b = v[1]; }
};

/// The largest elements of either sign (symmetric: of any), as bits without their sign, a lane's share in each.
template <class E, bool kSymmetric>
struct Extremes {
  using I = Int4Elements<E>;

  U32 positive[I::kVectors], negative[I::kVectors];

  Extremes() {
    for (int j = 0; j < I::kVectors; ++j) positive[j] = negative[j] = U32{};
  }
  /// Takes kStep more elements into account.
  inline __attribute__((always_inline)) void add(const typename E::Storage* p) {
    JLP_UNROLL(2)
    for (int j = 0; j < I::kVectors; ++j) {
      const U32 v = load<U32>(reinterpret_cast<const uint8_t*>(p) + j * JLP_VECTOR_BYTES);
      positive[j] =
          I::larger(positive[j], kSymmetric ? v & ~I::kSign : v);  // negative numbers are below 0, so far the least
      if (!kSymmetric) negative[j] = I::larger(negative[j], v ^ I::kSign);
    }
  }
};

/// An element rounded to the deployment dtype.
template <class E, class Deploy>
JLP_RULE F32 deployed(F32 x) {
  if constexpr (std::is_same_v<typename Int4Elements<E>::Deploy, Deploy>) return x;
  return Deploy::round(x);
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
