// Random bits: of stochastic rounding, 16 bytes for each 16 elements along the quantised axis (numerics.md 4).
#pragma once

#include "../../numerics/philox.h"
#include "../../problems.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The key and the stream, copied: if they were read through pointers, the compiler would have to read them again after
/// every store of random bytes.
struct RandomKey {
  uint32_t key0, key1, stream;

  explicit RandomKey(const Random& random) : key0(random.key[0]), key1(random.key[1]), stream(random.stream) {}
};

#if defined(JLP_ISA_AVX512)
/// philox4x32_10 of kLanes counters. Those of the even and of the odd lanes lie in words of 64 bits, whose upper halves may
/// hold anything, so that a product's halves are a shift apart and need not be put together until the end.
JLP_RULE void philox(U32 (&counter)[4], uint32_t key0, uint32_t key1) {
  const __m512i m0 = _mm512_set1_epi32(static_cast<int>(kPhiloxMultiplier0)),
                m1 = _mm512_set1_epi32(static_cast<int>(kPhiloxMultiplier1));
  const auto high = [](__m512i product) { return _mm512_srli_epi64(product, 32); };
  const auto exclusive_or = [](__m512i a, __m512i b, uint32_t key) {
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi32(static_cast<int>(key)), 0x96);
  };
  __m512i half[2][4];
  JLP_UNROLL(4)
  for (int i = 0; i < 4; ++i) half[0][i] = raw(counter[i]), half[1][i] = high(raw(counter[i]));
  JLP_UNROLL(10)
  for (int round = 0; round < 10; ++round) {
    JLP_UNROLL(2)
    for (auto& c : half) {
      const __m512i product0 = _mm512_mul_epu32(c[0], m0), product1 = _mm512_mul_epu32(c[2], m1);
      c[0] = exclusive_or(high(product1), c[1], key0);
      c[1] = product1;
      c[2] = exclusive_or(high(product0), c[3], key1);
      c[3] = product0;
    }
    key0 += kPhiloxKeyStep0, key1 += kPhiloxKeyStep1;
  }
  JLP_UNROLL(4)
  for (int i = 0; i < 4; ++i)
    counter[i] = (U32)_mm512_mask_blend_epi32(0xAAAA, half[0][i], _mm512_slli_epi64(half[1][i], 32));
}
#else
JLP_RULE void philox(U32 (&counter)[4], uint32_t key0, uint32_t key1) { philox4x32_10<F32>(counter, key0, key1); }
#endif

/// The four words of each lane, one lane's after the other's.
JLP_RULE void store_in_turns(void* to, const U32 (&words)[4]) {
  uint8_t* bytes = static_cast<uint8_t*>(to);
  const U32 low02 = shuffle<InterleaveLow>(words[0], words[2]), high02 = shuffle<InterleaveHigh>(words[0], words[2]);
  const U32 low13 = shuffle<InterleaveLow>(words[1], words[3]), high13 = shuffle<InterleaveHigh>(words[1], words[3]);
  store(bytes, shuffle<InterleaveLow>(low02, low13));
  store(bytes + JLP_VECTOR_BYTES, shuffle<InterleaveHigh>(low02, low13));
  store(bytes + 2 * JLP_VECTOR_BYTES, shuffle<InterleaveLow>(high02, high13));
  store(bytes + 3 * JLP_VECTOR_BYTES, shuffle<InterleaveHigh>(high02, high13));
}

/// 16 bytes for each 16 elements of a packet.
JLP_RULE void random_row_packet(const RandomKey& random, uint32_t row, U32 blocks, uint8_t* bytes) {
  U32 counter[4] = {blocks, fill<F32>(row), fill<F32>(random.stream), U32{}};
  philox(counter, random.key0, random.key1);
  store_in_turns(bytes, counter);
}

/// The words of one call for each of kLanes columns. As bytes for 16 rows: byte k of the four words is row k's.
JLP_RULE void random_columns(const RandomKey& random, U32 columns, uint32_t block, U32 (&words)[4]) {
  words[0] = fill<F32>(block), words[1] = columns, words[2] = fill<F32>(random.stream), words[3] = U32{};
  philox(words, random.key0, random.key1);
}

/// Random bytes of a span, 16 for 16 elements. They come before the codes for the same reason as the scales do.
struct RandomSpan {
  alignas(64) uint8_t bytes[kSpan][kPacket];

  /// `packets` packets of each of `count` rows. Not inlined: all formats and types of elements share it.
  __attribute__((noinline)) void compute(const Random& random, const uint32_t* rows, int count, const uint32_t* blocks,
                                         int packets) {
    const RandomKey key(random);
    if (packets == 1) {  // all rows have the same blocks: the compiler computes once what depends only on these
      const U32 these = load<U32>(blocks);
      for (int r = 0; r < count; ++r) random_row_packet(key, rows[r], these, bytes[r]);
      return;
    }
    for (int r = 0; r < count; ++r)
      for (int g = 0; g < packets; ++g)
        random_row_packet(key, rows[r], load<U32>(blocks + g * kLanes), bytes[r * packets + g]);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
