// The largest magnitude of parts of a matrix, and of its columnwise random Hadamard transform (numerics.md 1 and 3), for the
// amax kernel and for the kernels that take the amaxes of what they write.
#pragma once

#include "../../numerics/hadamard.h"
#include "../../problems.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// NaN becomes the one quiet NaN and subnormals zero, whatever was found.
JLP_RULE uint32_t canonical_amax(uint32_t bits) {
  if (bits > kInfinityBits) return kNaNBits;
  return bits < kMinNormalBits ? 0 : bits;
}

JLP_RULE void raise(uint32_t* target, uint32_t bits) {
  uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(target, &seen, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

/// The largest magnitude of a run of elements.
template <class E>
__attribute__((noinline)) uint32_t amax_of(const typename E::Storage* x, int64_t count) {
  U32 most = U32{};
  for (; count >= kPacket; x += kPacket, count -= kPacket) most = max_magnitude(most, E::packet_amax(x));
  for (; count >= kLanes; x += kLanes, count -= kLanes) most = max_magnitude(most, magnitude(E::load_lanes(x)));
  if (count > 0) {
    alignas(64) typename E::Storage padded[kLanes] = {};
    memcpy(padded, x, count * sizeof *x);
    most = max_magnitude(most, magnitude(E::load_lanes(padded)));
  }
  return max_lane(most);
}

/// The largest magnitude of a slab's rotated columns, rounded to the element type.
template <class E, bool kFetchesAhead>
__attribute__((noinline)) uint32_t rotated_amax(const Staged<E, kBlock, kPacket, kFetchesAhead>& slab,
                                                const uint32_t* signs) {
  U32 most = U32{};
  for (int j = 0; j < kPairs && 2 * kLanes * j < slab.columns; ++j) {
    F32 even[kBlock], odd[kBlock];
    JLP_UNROLL(16)
    for (int r = 0; r < kBlock; ++r) {
      const Pair pair = E::load_pair(&slab.x[r][2 * kLanes * j]);
      even[r] = L::from_bits(L::bits(pair.even) ^ signs[r]);
      odd[r] = L::from_bits(L::bits(pair.odd) ^ signs[r]);
    }
    for (F32* v : {even, odd}) {
      hadamard_butterfly<kBlock / 2>(v);
      hadamard_butterfly<kBlock / 2>(v + kBlock / 2);
      // The larger of |a + b| and |a - b| is |a| + |b|. Where that is not finite its kind may differ from the sums' own.
      JLP_UNROLL(8)
      for (int i = 0; i < kBlock / 2; ++i) most = max_magnitude(most, L::bits(absolute(v[i]) + absolute(v[i + kBlock / 2])));
    }
  }
  // Scaling by 1/4 and rounding are monotone: once, at the end, will do.
  return canonical_amax(max_lane(magnitude(E::round(L::from_bits(most) * 0.25f))));
}

/// The same, one operation after another, for slabs that hold or reach infinity or NaN.
template <class E, bool kFetchesAhead>
__attribute__((noinline)) uint32_t rotated_amax_not_finite(const Staged<E, kBlock, kPacket, kFetchesAhead>& slab,
                                                           const uint32_t* signs) {
  U32 most = U32{};
  for (int j = 0; j < kPairs && 2 * kLanes * j < slab.columns; ++j) {
    F32 even[kBlock], odd[kBlock];
    for (int r = 0; r < kBlock; ++r) {
      const Pair pair = E::load_pair(&slab.x[r][2 * kLanes * j]);
      even[r] = L::from_bits(L::bits(pair.even) ^ signs[r]);
      odd[r] = L::from_bits(L::bits(pair.odd) ^ signs[r]);
    }
    for (F32* v : {even, odd}) {
      hadamard_butterfly<kBlock>(v);
      for (int r = 0; r < kBlock; ++r) most = max_magnitude(most, magnitude(E::round(v[r] * 0.25f)));
    }
  }
  return canonical_amax(max_lane(most));
}

/// Gathers the wanted amaxes of some slabs of a matrix; `raise` hands them in.
template <class E>
class GatheredAmaxes {
 public:
  explicit GatheredAmaxes(const ResultAmaxes& wanted) : wanted_(wanted) {
    for (int r = 0; r < kBlock; ++r) signs_[r] = ((wanted.sign_mask >> r) & 1u) << 31;
  }

  bool wanted() const { return wanted_.wanted(); }

  template <bool kFetchesAhead>
  void add(const Staged<E, kBlock, kPacket, kFetchesAhead>& slab) {
    if (wanted_.plain) plain_ = std::max(plain_, amax_of<E>(slab.x[0], kBlock * kPacket));
    if (!wanted_.rotated) return;
    uint32_t most = rotated_amax(slab, signs_);
    if (__builtin_expect(most >= kInfinityBits, 0)) most = rotated_amax_not_finite(slab, signs_);
    rotated_ = std::max(rotated_, most);
  }

  void raise(int64_t batch) const {
    if (wanted_.plain) JLP_ISA::raise(&wanted_.plain[batch], canonical_amax(plain_));
    if (wanted_.rotated) JLP_ISA::raise(&wanted_.rotated[batch], rotated_);
  }

 private:
  ResultAmaxes wanted_;
  uint32_t signs_[kBlock], plain_ = 0, rotated_ = 0;
};

// Tensor amax: the largest magnitude of a matrix, and of its columnwise random Hadamard transform (numerics.md 1 and 3).
// Bytes moved: the input once, both maxima together.

template <class E>
struct Amax {
  using Storage = typename E::Storage;

  static int64_t chunks_per_matrix(const AmaxProblem& p) {
    if (p.rotated) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kPacket);
    return divide_up(p.rows * p.columns, elements_of_chunk(p.rows * p.columns));
  }

  static void chunk(const AmaxProblem& p, int64_t batch, int64_t chunk) {
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    if (!p.rotated) {
      const int64_t size = p.rows * p.columns, each = elements_of_chunk(size);
      const int64_t first = chunk * each, count = std::min(each, size - first);
      return raise(&p.plain[batch], canonical_amax(amax_of<E>(x + first, count)));
    }
    GatheredAmaxes<E> amaxes(ResultAmaxes{p.plain, p.rotated, p.sign_mask});
    const int64_t column_tiles = divide_up(p.columns, kPacket);
    const int64_t first = chunk / column_tiles * kColumnTileRows, column = chunk % column_tiles * kPacket;
    for (int64_t row = first; row < std::min(first + kColumnTileRows, p.rows); row += kBlock)
      amaxes.add(Slab<E>(x, p.rows, p.columns, row, column));
    amaxes.raise(batch);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
