// NVFP4 blocks whose scales are corrected and rounded stochastically (numerics.md 14), in the layout of best_scale.h: 16
// elements in each lane's block, one vector after the other, since the sums are added up in order.
#pragma once

#include "../../numerics/nvfp4.h"
#include "best_scale.h"
#include "random.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Codes of blocks, and scales that are corrected for their errors.
template <bool kSaturate>
JLP_RULE BlockCodes eden_encode(const Sixteens& x, F32 minus_encode, F32 scale, U32 bits) {
  F32 energy = F32{}, product = F32{};
  BlockCodes found;
  found.encode<kSaturate>(
      x, minus_encode, [&](F32 a, U32 code) __attribute__((always_inline)) {
        eden_add(a, of_code(kE2M1Numbers, code), energy, product);
      });
  found.scale = eden_scale(scale, energy, product, bits);
  return found;
}

/// Blocks that take the best of several scales, and then the corrected one.
template <ScaleError kError>
struct EdenBestSpan : BestSpan<kError> {
  template <bool kSaturate>
  __attribute__((always_inline)) BlockCodes encode(int n, U32 bits) const {
    return eden_encode<kSaturate>(this->sixteens[n], this->minus_encode(n), float8_decode<E4M3, F32>(this->scale(n)), bits);
  }
};

/// Blocks whose scale makes their largest element 6, and then the corrected one.
struct EdenSixSpan {
  static constexpr int kMost = 8;
  Sixteens sixteens[kMost];
  F32 scale[kMost], minus_encodes[kMost];

  __attribute__((noinline)) void set(int count, const RoomScale& tensor) {
    const float multiplier = nvfp4_multiplier(tensor.encode);
    for (int n = 0; n < count; ++n) {
      nvfp4_block_scale(L::from_bits(sixteens[n].amax), multiplier, scale[n]);
      minus_encodes[n] = -nvfp4_block_encode_by_value(scale[n], tensor.decode);
    }
  }

  F32 minus_encode(int n) const { return minus_encodes[n]; }
  template <bool kSaturate>
  __attribute__((always_inline)) BlockCodes encode(int n, U32 bits) const {
    return eden_encode<kSaturate>(sixteens[n], minus_encodes[n], scale[n], bits);
  }
};

/// Calls visit with the kind of span of a rule: its blocks' scales rounded to nearest, or as eden does.
template <class Visit>
auto with_span(ScaleRule rule, bool eden, Visit visit) {
  if (eden && rule == ScaleRule::kSix) return visit(Tag<EdenSixSpan>());
  return with_scale_error(rule, [&](auto error) {
    constexpr ScaleError kError = decltype(error)::value;
    return eden ? visit(Tag<EdenBestSpan<kError>>()) : visit(Tag<NearestSpan<kError>>());
  });
}

// --- random bits, which come before the codes: a number a block

/// Those of packets of a row, or of the rows of a slab. Of neighbouring blocks, those whose calls are the same share them.
struct ScaleBits {
  alignas(64) uint32_t bits[kSpan * kLanes];

  /// `packets` packets of each of `count` rows; one of the two is 1.
  __attribute__((noinline)) void compute(const Random& random, const uint32_t* rows, int count, const uint32_t* blocks,
                                         int packets) {
    alignas(64) uint32_t calls[kMostCalls], lines[kMostCalls];
    int place[kSpan * kLanes], number = 0;  // of a row's blocks: where their words are, and how many calls a row has
    for (int i = 0; i < packets * kLanes; ++i) {
      const uint32_t call = blocks[i] / kEdenBlocks;
      if (i == 0 || call != calls[number - 1]) calls[number++] = call;
      place[i] = kEdenBlocks * (number - 1) + static_cast<int>(blocks[i] % kEdenBlocks);
    }
    for (int r = count - 1; r >= 0; --r)
      for (int k = 0; k < number; ++k) calls[r * number + k] = calls[k], lines[r * number + k] = rows[r];
    const int all = count * number;
    for (int k = all; k % kLanes != 0; ++k) calls[k] = lines[k] = 0;
    alignas(64) uint32_t words[kMostCalls * kEdenBlocks];
    const RandomKey key(random);
    for (int k = 0; k < all; k += kLanes) {
      U32 counter[4] = {load<U32>(calls + k), load<U32>(lines + k), fill<F32>(key.stream), U32{}};
      philox(counter, key.key0, key.key1);
      store_in_turns(words + kEdenBlocks * k, counter);
    }
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < packets * kLanes; ++i)
        bits[r * packets * kLanes + i] = eden_bits<float>(words[kEdenBlocks * r * number + place[i]]);
  }

 private:
  static constexpr int kMostCalls = kSpan * kLanes;  // where no two blocks share one
};

/// Those of the blocks of a tile's columns, a slab after another.
class ColumnBits {
 public:
  /// Of the slab with this index of blocks; `columns` are the indices of the lines, kPacket of them.
  const uint32_t* of(const Random& random, const uint32_t* columns, uint32_t block) {
    if (!known_ || block / kEdenBlocks != call_) compute(random, columns, block / kEdenBlocks);
    return bits_[block % kEdenBlocks];
  }

 private:
  __attribute__((noinline)) void compute(const Random& random, const uint32_t* columns, uint32_t call) {
    const RandomKey key(random);
    for (int j = 0; j < kPacket; j += kLanes) {
      U32 words[4];
      random_columns(key, load<U32>(columns + j), call, words);
      for (int k = 0; k < kEdenBlocks; ++k) store(bits_[k] + j, eden_bits<F32>(words[k]));
    }
    known_ = true, call_ = call;
  }

  bool known_ = false;
  uint32_t call_ = 0;
  alignas(64) uint32_t bits_[kEdenBlocks][kPacket];
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
