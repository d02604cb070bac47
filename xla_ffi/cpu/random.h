// Random bytes of stochastic rounding: 16 for each group of 16 elements along the quantised axis (numerics.md 4).
#pragma once

#include "../numerics/philox.h"
#include "../problems.h"
#include "tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// 16 bytes for each 16 elements of a group.
JLP_RULE void random_row_group(const Random& random, uint32_t row, const uint32_t* blocks, uint8_t* bytes) {
  U32 counter[4] = {load<U32>(blocks), fill<F32>(row), fill<F32>(random.stream), U32{}};
  philox4x32_10<F32>(counter, random.key[0], random.key[1]);
  const U32 low02 = shuffle<InterleaveLow>(counter[0], counter[2]), high02 = shuffle<InterleaveHigh>(counter[0], counter[2]);
  const U32 low13 = shuffle<InterleaveLow>(counter[1], counter[3]), high13 = shuffle<InterleaveHigh>(counter[1], counter[3]);
  store(bytes, shuffle<InterleaveLow>(low02, low13));
  store(bytes + JLP_VECTOR_BYTES, shuffle<InterleaveHigh>(low02, low13));
  store(bytes + 2 * JLP_VECTOR_BYTES, shuffle<InterleaveLow>(high02, high13));
  store(bytes + 3 * JLP_VECTOR_BYTES, shuffle<InterleaveHigh>(high02, high13));
}

/// The same for 16 rows of kLanes columns: byte k of the four words is row k's.
JLP_RULE void random_columns(const Random& random, U32 columns, uint32_t block, U32 (&words)[4]) {
  words[0] = fill<F32>(block), words[1] = columns, words[2] = fill<F32>(random.stream), words[3] = U32{};
  philox4x32_10<F32>(words, random.key[0], random.key[1]);
}

/// Random bytes of a span, 16 for 16 elements. They come before the codes for the same reason as the scales do.
template <bool kStochastic>
struct RandomSpan {
  alignas(64) uint8_t bytes[kSpan][kGroup];
};
template <>
struct RandomSpan<false> {
  uint8_t* bytes[kSpan];
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
