// NVFP4 blocks that take the best of several scales (numerics.md 13): which one, by estimates of the errors where they tell
// and else by the exact sums, and then the codes by it.
#pragma once

#include "../../problems.h"
#include "estimated_errors.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Several times kLanes blocks. Each step is done for all of them, so that one's long chain of dependent operations hides
/// behind the others'.
template <ScaleError kError>
struct BestSpan {
  static constexpr int kMost = 8;
  Sixteens sixteens[kMost];
  EstimatedTrials<kError> trials[kMost];  // of these, in the end, the first are the best

  __attribute__((noinline)) void set(int count, const RoomScale& tensor) {
    for (int n = 0; n < count; ++n) trials[n].set(sixteens[n].amax, tensor);
    if constexpr (kEstimates) {
      Estimates<kError> estimates[kMost];
      for (int n = 0; n < count; ++n) estimates[n].add_up(sixteens[n], trials[n]);
      for (int n = 0; n < count; ++n)
        if (__builtin_expect(!estimates[n].choose(trials[n], sixteens[n].amax, 1), 0)) choose_exactly(n, tensor);
    } else {
      for (int n = 0; n < count; ++n) choose_exactly(n, tensor);
    }
  }

  F32 minus_encode(int n) const { return trials[n].trial[0].minus_encode; }
  U32 scale(int n) const { return trials[n].trial[0].byte; }

 private:
  __attribute__((noinline)) void choose_exactly(int n, const RoomScale& tensor) {
    Errors<kError> errors;
    errors.add_up(sixteens[n], trials[n], tensor);
    errors.choose(trials[n]);
  }
};

/// Whose scales are those that were tried, without random bits.
template <ScaleError kError>
struct NearestSpan : BestSpan<kError> {
  template <bool kSaturate>
  __attribute__((always_inline)) BlockCodes encode(int n, U32) const {
    BlockCodes found;
    found.encode<kSaturate>(this->sixteens[n], this->minus_encode(n), [](F32, U32) __attribute__((always_inline)){});
    found.scale = this->scale(n);
    return found;
  }
};

/// A type as a value.
template <class T>
struct Tag {
  using Type = T;
};

// --- rows

/// Codes and scales of packets that lie together. `bits`: random ones of each block; null for spans that take none.
template <class E, class Span>
__attribute__((noinline)) void encode_best_packets(const typename E::Storage* x, int packets, const RoomScale& tensor,
                                                   const uint32_t* bits, const PacketsAhead<E>& ahead, uint8_t* data,
                                                   uint8_t* scale) {
  Span span;
  for (int first = 0; first < packets; first += Span::kMost) {
    const int count = std::min(packets - first, Span::kMost);
    for (int n = 0; n < count; ++n) {
      ahead.fetch(first + n);
      read_row_packet<E>(x + (first + n) * kPacket, span.sixteens[n]);
    }
    span.set(count, tensor);
    for (int n = 0; n < count; ++n, data += kPacketBytes, scale += kLanes) {
      const BlockCodes found = encode(span, n, bits ? load<U32>(bits + (first + n) * kLanes) : U32{});
      store_interleaved(data, found.codes[0], found.codes[1]);
      store_low_bytes(scale, found.scale);
    }
  }
}

// --- columns

/// Codes and scales of a slab's columns, as encode_slab_columns and column_scales have them. `bits`: random ones of each
/// column; null for spans that take none.
template <class E, class Span>
__attribute__((noinline)) void encode_best_slab_columns(const typename E::Storage* x, const RoomScale& tensor,
                                                        const uint32_t* bits, int pairs, const PacketsAhead<E>& ahead,
                                                        uint64_t (&codes)[2][kPacket / 2], uint8_t* scale) {
  Span span;
  for (int first = 0; first < pairs; first += Span::kMost / 2) {
    const int count = std::min(pairs - first, Span::kMost / 2);
    for (int n = 0; n < count; ++n) {
      const int j = first + n;
      for (int r = 2 * j; r < 2 * j + kBlock / kPairs; ++r) ahead.fetch(r);
      read_columns<E>(x + 2 * kLanes * j, span.sixteens[2 * n], span.sixteens[2 * n + 1]);
    }
    span.set(2 * count, tensor);
    for (int n = 0; n < count; ++n, scale += 2 * kLanes) {
      const int at = kLanes * (first + n);
      const U32 low = bits ? load<U32>(bits + 2 * at) : U32{}, high = bits ? load<U32>(bits + 2 * at + kLanes) : U32{};
      const BlockCodes even = encode(span, 2 * n, shuffle<EvenLanes>(low, high));
      const BlockCodes odd = encode(span, 2 * n + 1, shuffle<OddLanes>(low, high));
      store_interleaved(&codes[0][at], even.codes[0], even.codes[1]);
      store_interleaved(&codes[1][at], odd.codes[0], odd.codes[1]);
      store_low_bytes(scale, shuffle<InterleaveLow>(even.scale, odd.scale));
      store_low_bytes(scale + kLanes, shuffle<InterleaveHigh>(even.scale, odd.scale));
    }
  }
}

// --- 16x16 tiles

/// The exact errors of a slab's tiles put the best of the scales first.
template <class E, ScaleError kError>
__attribute__((noinline)) void choose_tile_scales_exactly(const typename E::Storage (*x)[kPacket], const RoomScale& tensor,
                                                          Trials<kError>& trials) {
  constexpr int kCount = scales_tried(kError);
  Errors<kError> errors;
  F32 sums[kCount][kBlock];
  Sixteens sixteens;
  for (int r = 0; r < kBlock; ++r) {
    read_row_packet<E>(x[r], sixteens);
    errors.add_up(sixteens, trials, tensor);
    for (int t = 0; t < kCount; ++t) sums[t][r] = errors.sum[t];
  }
  for (int t = 0; t < kCount; ++t) {
    for (int rows = kBlock / 2; rows > 0; rows /= 2)
      for (int r = 0; r < rows; ++r) sums[t][r] += sums[t][r + rows];
    errors.sum[t] = sums[t][0];
  }
  errors.choose(trials);
}

/// Scale bytes of a slab's tiles and what their elements are multiplied by, from the maxima of the tiles. A tile that holds
/// NaN or infinity has NaN for both.
template <class E, ScaleError kError>
__attribute__((noinline)) void best_tile_scales(const typename E::Storage (*x)[kPacket], U32 amax, const RoomScale& tensor,
                                                U32& scale, F32& encode) {
  EstimatedTrials<kError> trials;
  trials.set(amax, tensor);
  bool chosen = false;
  if constexpr (kEstimates) {
    Estimates<kError> all, row;
    Sixteens sixteens;
    for (int r = 0; r < kBlock; ++r) {
      read_row_packet<E>(x[r], sixteens);
      (r > 0 ? row : all).add_up(sixteens, trials);
      if (r > 0) all.add(row);
    }
    chosen = all.choose(trials, amax, kBlock);
  }
  if (__builtin_expect(!chosen, !kEstimates)) choose_tile_scales_exactly<E, kError>(x, tensor, trials);
  const auto poisoned = amax >= kInfinityBits;
  scale = poisoned ? fill<F32>(kFloat8NaN) : trials.trial[0].byte;
  encode = poisoned ? L::from_bits(fill<F32>(kNaNBits)) : -trials.trial[0].minus_encode;
}

/// Calls visit with the error that a rule compares scales by, a std::integral_constant.
template <class Visit>
auto with_scale_error(ScaleRule rule, Visit visit) {
  switch (rule) {
    case ScaleRule::kFourOverSix: return visit(std::integral_constant<ScaleError, ScaleError::kAbsolute>());
    case ScaleRule::kFourOverSixMse: return visit(std::integral_constant<ScaleError, ScaleError::kSquared>());
    default: return visit(std::integral_constant<ScaleError, ScaleError::kRelativeSquared>());
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
