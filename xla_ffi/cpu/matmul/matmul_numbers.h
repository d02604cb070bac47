// The operands of matmul_float8.h as float32 numbers, one to a unit: how codes become them and how they are multiplied.
#pragma once

#include <algorithm>

#include "../../numerics/e2m1.h"
#include "../../numerics/float8.h"
#include "../elements.h"
#include "unpack_float8.h"

namespace jaxlowprec {
namespace JLP_ISA {

using Unit = float;
using UnitVector = F32;
constexpr int kPerUnit = 1;

JLP_RULE F32 splat_unit(float number) { return L::splat(number); }

/// sums + a * b, rounded once: kMayUnderflow, or a product that is exact.
template <bool kMayUnderflow>
JLP_RULE F32 add_products_of(F32 a, F32 b, F32 sums) {
  return kMayUnderflow ? L::fused_multiply_add_short(a, b, sums) : L::multiply_add_exact(a, b, sums);
}

template <class Element>
JLP_RULE F32 decode(U32 bits) {  // the upper bits are ignored
  if constexpr (Element::kPacked)
    return e2m1_decode<F32>(bits);
  else
    return float8_decode<Element, F32>(bits);
}

/// Up to 16 bytes; what follows the last is zero.
JLP_RULE Bytes16 load_some(const uint8_t* data, int64_t count) {
  if (count >= 16) return load<Bytes16>(data);
  Bytes16 bytes = Bytes16{};
  memcpy(&bytes, data, count);
  return bytes;
}

/// Numbers of one row of a; what follows the last byte's is zero.
template <class Element, class Scaled>
__attribute__((noinline)) static void unpack_row_units(const uint8_t* data, int64_t bytes, Scaled scaled, float* out) {
#if defined(JLP_HAVE_HALF_CONVERSION)
  if constexpr (!Element::kPacked) {
    SpecialCodes<Element> special;
    for (int64_t at = 0; at < bytes; at += 16) {
      const Bytes16 codes = load_some(data + at, bytes - at);
      special.look(codes);
      store_numbers<Element>(codes, [&](F32 numbers) { return scaled(numbers, at); }, out + at);
    }
    if (__builtin_expect(!special.any(), 1)) return;
  }
#endif
  for (int64_t at = 0; at < bytes; at += kLanes) {
    alignas(64) uint8_t padded[kLanes] = {};
    const uint8_t* from = data + at;
    if (bytes - at < kLanes) memcpy(padded, from, bytes - at), from = padded;
    const U32 codes = load_u8(from);
    if constexpr (Element::kPacked)
      Float::store_pair(out + 2 * at, {scaled(decode<Element>(codes), 2 * at), scaled(decode<Element>(codes >> 4), 2 * at)});
    else
      store(out + at, scaled(decode<Element>(codes), at));
  }
}

/// Numbers of kLanes rows of b, `stride` bytes apart; those beyond `rows` are zero.
template <class Element, class Scaled>
__attribute__((noinline)) static void unpack_vector_units(const uint8_t* data, int64_t stride, int64_t rows, int64_t bytes,
                                                          Scaled scaled, float* out) {
#if defined(JLP_HAVE_HALF_CONVERSION)
  if constexpr (!Element::kPacked) {
    SpecialCodes<Element> special;
    for (int64_t at = 0; at < bytes; at += 16) {
      Bytes16 v[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        v[r] = r < rows ? load_some(data + r * stride + at, bytes - at) : Bytes16{};
        special.look(v[r]);
      }
      store_numbers_transposed<Element>(v, [&](F32 numbers) { return scaled(numbers, at); }, out + at * kLanes);
    }
    if (__builtin_expect(!special.any(), 1)) return;
  }
#endif
  constexpr int kBits = Element::kPacked ? 4 : 8, kPerWord = 32 / kBits;
  int64_t k = 0;
  for (int64_t at = 0; at < bytes; at += JLP_VECTOR_BYTES) {
    const int64_t count = std::min<int64_t>(JLP_VECTOR_BYTES, bytes - at);
    U32 v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      v[r] = U32{};
      if (r < rows && count == JLP_VECTOR_BYTES)
        v[r] = load<U32>(data + r * stride + at);
      else if (r < rows)
        memcpy(&v[r], data + r * stride + at, count);
    }
    transpose(v);  // v[w]: word w of every row
    for (int w = 0; w < kLanes && 4 * w < count; ++w) {
      JLP_UNROLL(8)
      for (int i = 0; i < kPerWord; ++i, ++k) store(out + k * kLanes, scaled(decode<Element>(v[w] >> (i * kBits)), k));
    }
  }
}

/// float32 numbers have no faster path for moderate MX scales; matmul_pairs.h has one.
template <class Element>
JLP_RULE bool unpack_moderate_units(const uint8_t*, int64_t, int64_t, const uint8_t*, int64_t, int64_t, float*) {
  return false;
}

/// float32 units need no padding at the end of a row or a vector; matmul_pairs.h pads.
JLP_RULE void end_row(int64_t, Unit*) {}
JLP_RULE void end_vector(int64_t, Unit*) {}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
