// The random Hadamard transform of 16 elements of a column (numerics.md 3).
#pragma once

#include "../../numerics/hadamard.h"
#include "tile.cuh"

namespace jaxlowprec {
namespace cuda {

/// A pair of columns as Tile::load_pair took them, with the signs of the transform.
template <class E>
JLP_DEVICE void flip_signs(uint32_t (&pairs)[Tile<E>::kPairWords], uint32_t sign_mask) {
#pragma unroll
  for (int i = 0; i < Tile<E>::kPairWords; ++i) {
    const uint32_t sign = sign_mask << (31 - i % 16) & kSignBit;
    pairs[i] ^= E::kBytes == 4 ? sign : sign | sign >> 16;
  }
}

template <class E>
JLP_DEVICE float column_value(const uint32_t (&pairs)[Tile<E>::kPairWords], int column, int row) {
  if constexpr (E::kBytes == 4)
    return as_float(pairs[16 * column + row]);
  else
    return column ? E::high(pairs[row]) : E::low(pairs[row]);
}

/// One column, its signs flipped, transformed and rounded to the elements' type.
template <class E>
JLP_DEVICE Sixteen<E> rotated_sixteen(const uint32_t (&pairs)[Tile<E>::kPairWords], int column) {
  float v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = column_value<E>(pairs, column, r);
  hadamard_butterfly<16>(v);
  Sixteen<E> sixteen;
#pragma unroll
  for (int i = 0; i < Sixteen<E>::kWords; ++i) {
    if constexpr (E::kBytes == 4)
      sixteen.words[i] = as_bits(v[i] * 0.25f);
    else
      sixteen.words[i] = E::pack(v[2 * i] * 0.25f, v[2 * i + 1] * 0.25f);
  }
  return sixteen;
}

}  // namespace cuda
}  // namespace jaxlowprec
