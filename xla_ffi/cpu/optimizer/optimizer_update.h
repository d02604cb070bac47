// AdamW and Lion in one pass (numerics.md 19): 32 elements of a row at a time are read, decoded, updated, encoded and
// written where they were read; nothing else is stored. How moments and weights are kept is known at run time and asked once
// for 32. Bytes moved per element: with 8-bit moments and remainders of 16 bits, 2 for the gradient of bfloat16 and 12.1
// read and written; with float32 throughout, 28.
#pragma once

#include "../../numerics/optimizer_states.h"
#include "../quantize/random.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kStateVectors = kStateBlock / kLanes;

/// 32 elements of a row.
struct StateBlock {
  F32 of[kStateVectors];
};

/// An array's elements of a block: where they are read, and where the new ones go.
struct BlockOfArray {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  int read = 0, written = 0;  // bytes of an element; 0: there are none

  BlockOfArray at(int64_t element) const { return {from + element * read, to + element * written, read, written}; }
};

/// The arrays of a problem, from the first element of a matrix.
struct UpdateArrays {
  enum { kG, kP, kRest, kMu, kNu, kCount };
  BlockOfArray of[kCount];
  const uint8_t* exponents[2];
  uint8_t* new_exponents[2];

  UpdateArrays(const OptimizerUpdateProblem& p, int64_t batch) {
    const auto array = [](const void* from, void* to, int read, int written) {
      return BlockOfArray{static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to), from ? read : 0, to ? written : 0};
    };
    const int weight = p.weight == WeightKind::kFloat32 ? 4 : 2, rest = p.weight == WeightKind::kRest8 ? 1 : 2;
    of[kG] = array(p.g, nullptr, element_bytes(p.g_type), 0);
    of[kP] = p.update ? array(p.p, p.update, weight, 4) : array(p.p, p.new_p, weight, weight);
    of[kRest] = array(p.rest, p.new_rest, rest, rest);
    for (int i = 0; i < 2; ++i) {
      const MomentState& m = i == 0 ? p.mu : p.nu;
      of[kMu + i] = m.codes ? array(m.codes, m.new_codes, 1, 1) : array(m.numbers, m.new_numbers, 4, 4);
      const int64_t before = batch * p.rows * p.blocks();
      exponents[i] = m.codes ? m.exponents + before : nullptr;
      new_exponents[i] = m.codes ? m.new_exponents + before : nullptr;
    }
    for (BlockOfArray& a : of) a = a.at(batch * p.rows * p.columns);
  }
};

// --- 32 elements

template <bool kSigned>
JLP_RULE StateBlock decode_state(const uint8_t* codes, uint32_t exponent) {
  StateBlock x;
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i) x.of[i] = state_decode<kSigned, F32>(load_u8(codes + i * kLanes), exponent);
  return x;
}

/// The low bytes of the lanes.
JLP_RULE void store_bytes(uint8_t* to, const U32 (&v)[kStateVectors]) {
  if constexpr (kStateVectors % 4 == 0) {
    JLP_UNROLL(2)
    for (int i = 0; i < kStateVectors; i += 4)
      store(to + i * kLanes, in_order(pack_bytes(v[i], v[i + 1], v[i + 2], v[i + 3])));
  } else {
    JLP_UNROLL(2)
    for (int i = 0; i < kStateVectors; ++i) store_low_bytes(to + i * kLanes, v[i]);
  }
}

/// The largest lane, in all of them.
JLP_RULE U32 largest_of_lanes(U32 v) {
  if constexpr (kLanes > 8) v = max_magnitude(v, shuffle<SwapLanes<8>>(v, v));
  if constexpr (kLanes > 4) v = max_magnitude(v, shuffle<SwapLanes<4>>(v, v));
  v = max_magnitude(v, shuffle<SwapLanes<2>>(v, v));
  return max_magnitude(v, shuffle<SwapLanes<1>>(v, v));
}

/// Returns the exponent. `draws`: of the elements; null: to nearest. kOrdinary: see state_rank.
template <bool kSigned, bool kOrdinary>
JLP_RULE uint8_t encode_state(const StateBlock& x, const uint16_t* draws, uint8_t* codes) {
  U32 rank[kStateVectors], most = U32{};
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i) {
    const U32 d = draws ? state_rounding<F32>(load_u16(draws + i * kLanes)) : fill<F32>(kStateToNearest);
    rank[i] = state_rank<kSigned, kOrdinary>(x.of[i], d);
    most = max_magnitude(most, rank[i]);
  }
  const U32 exponent = state_exponent<F32>(largest_of_lanes(most));
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i) rank[i] = state_code<kSigned, kOrdinary>(x.of[i], rank[i], exponent);
  store_bytes(codes, rank);
  return static_cast<uint8_t>(exponent[0]);
}

JLP_RULE F32 stored(F32 x) { return L::from_bits(stored_bits(x)); }

template <int kBits>
JLP_RULE StateBlock join_weights(const uint8_t* p, const uint8_t* rest) {
  StateBlock w;
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i) {
    const U32 low = kBits == 24 ? load_u8(rest + i * kLanes) : load_u16(rest + 2 * i * kLanes);
    w.of[i] = master_join<kBits, F32>(load_u16(p + 2 * i * kLanes), low);
  }
  return w;
}

template <class E>
JLP_RULE StateBlock load_block(const uint8_t* from) {
  StateBlock x;
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i)
    x.of[i] = E::load_lanes(reinterpret_cast<const typename E::Storage*>(from) + i * kLanes);
  return x;
}

// --- ordinary numbers, for which a division by a known number is a few multiply-adds, and encoding has no special cases

constexpr uint32_t kOrdinaryFrom = (127u - 90u) << 23, kOrdinarySpan = 190u << 23;  // 2^-90 to 2^100

#if defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)
/// x / b, correctly rounded, of an ordinary x.
///
/// high + low is 1 / b to 48 bits, so the first quotient is one of the two float32 numbers about x / b, and its remainder
/// is exact. By Markstein's theorem ("Computation of elementary functions on the IBM RISC System/6000 processor", 1990) the
/// corrected one is the nearest: high is the nearest to 1 / b, and b's fraction is not all ones.
class KnownDivisor {
 public:
  explicit KnownDivisor(float b) : b_(b), high_(1.0f / b), low_(std::fma(-high_, b, 1.0f) / b) {
    const uint32_t bits = Lanes<float>::bits(b);
    serves = bits - ((127u - 20u) << 23) < 40u << 23 && (bits & 0x7FFFFFu) != 0x7FFFFFu;
  }
  bool serves;  // b is from 2^-20 to 2^20

  F32 divide(F32 x) const {
    const F32 near = L::fused_multiply_add(x, L::splat(high_), x * low_);
    const F32 rest = L::fused_multiply_add(near, L::splat(-b_), x);
    return L::fused_multiply_add(rest, L::splat(high_), near);
  }

 private:
  float b_, high_, low_;
};

/// Whether all lanes are at most so much.
JLP_RULE bool all_at_most(U32 v, uint32_t most) {
#if defined(JLP_ISA_AVX512)
  return _mm512_cmpgt_epu32_mask(raw(v), _mm512_set1_epi32(static_cast<int>(most))) == 0;
#else
  return _mm256_movemask_ps((__m256)(v > most)) == 0;
#endif
}
#else  // a fused multiply-add would be a call
class KnownDivisor {
 public:
  explicit KnownDivisor(float b) : b_(b) {}
  static constexpr bool serves = false;
  F32 divide(F32 x) const { return x / b_; }

 private:
  float b_;
};
JLP_RULE bool all_at_most(U32, uint32_t) { return false; }
#endif

/// Quotients of a block's moments.
template <class Rule>
struct DirectionOf {
  explicit DirectionOf(const typename Rule::Scalars&) {}
  static constexpr bool serves = true;

  template <bool kOrdinary>
  F32 of(F32 m, F32 v, const typename Rule::Scalars& s) const {
    return Rule::template direction<F32>({m, v, F32{}}, s);
  }
};
template <>
struct DirectionOf<AdamW> {
  explicit DirectionOf(const AdamW::Scalars& s) : k1(s.k1), k2(s.k2), serves(k1.serves && k2.serves) {}
  KnownDivisor k1, k2;
  bool serves;

  template <bool kOrdinary>
  F32 of(F32 m, F32 v, const AdamW::Scalars& s) const {
    if constexpr (!kOrdinary) return AdamW::direction<F32>({m, v, F32{}}, s);
    return AdamW::direction_of_quotients<F32>(k1.divide(m), k2.divide(v), s);
  }
};

// --- the pass

/// A matrix as rows of blocks: one row where no element need know its own, nor a block where rows end.
struct UpdateRows {
  int64_t columns, blocks, blocks_of_matrix;

  explicit UpdateRows(const OptimizerUpdateProblem& p) : columns(p.columns) {
    const bool coded = p.mu.codes || p.nu.codes, is_one = !p.drawn() && (!coded || p.columns % kStateBlock == 0);
    if (is_one) columns = p.rows * p.columns;
    blocks = divide_up(columns, kStateBlock);
    blocks_of_matrix = is_one ? blocks : p.rows * blocks;
  }
};

template <class Rule>
class UpdatePass {
 public:
  static constexpr int kRun = kLanes * kDrawsOfCall / kStateBlock;  // blocks whose draws come from one vector of calls

  UpdatePass(const OptimizerUpdateProblem& given, const UpdateRows& rows, int64_t batch)
      : p(given),
        rows_(rows),
        arrays_(given, batch),
        words_(given.words ? given.words + 4 * batch : nullptr),
        scalars_(load<typename Rule::Scalars>(p.scalars + kUpdateScalars<Rule> * batch)),
        direction_(scalars_) {}

  /// `count` blocks of a row, at most kRun.
  void run(int64_t row, int64_t block, int count) {
    if (words_) draw(row, block, count);
    BlockOfArray at[UpdateArrays::kCount];
    for (int a = 0; a < UpdateArrays::kCount; ++a) at[a] = arrays_.of[a].at(row * rows_.columns + block * kStateBlock);
    for (int i = 0; i < count; ++i, ++block) {
      const int64_t left = rows_.columns - block * kStateBlock;
      if (left >= kStateBlock)
        update(at, row * rows_.blocks + block, i * kStateBlock);
      else
        update_part(at, static_cast<int>(left), row * rows_.blocks + block, i * kStateBlock);
      for (BlockOfArray& a : at) a = a.at(kStateBlock);
    }
  }

 private:
  void draw(int64_t row, int64_t block, int count) {
    U32 eighths = U32{};
    for (int i = 0; i < kLanes; ++i)
      if (i / 4 < count) eighths[i] = p.block_numbers[block + i / 4] * 4 + i % 4;
    const bool drawn[] = {p.mu.stochastic || p.nu.stochastic, p.weight == WeightKind::kDrawn};
    JLP_UNROLL(2)
    for (int which = 0; which < 2; ++which) {
      if (!drawn[which]) continue;
      U32 counter[4] = {eighths, fill<F32>(p.row_numbers[row]), fill<F32>(kDrawnHalves), U32{}};
      philox(counter, words_[2 * which], words_[2 * which + 1]);
      store_in_turns(draws_[which], counter);
    }
  }

  /// A row's last block, of fewer elements: the others are zeros, whose codes change no exponent.
  __attribute__((noinline)) void update_part(const BlockOfArray (&at)[UpdateArrays::kCount], int count, int64_t block,
                                             int drawn) {
    alignas(64) uint8_t padded[UpdateArrays::kCount][4 * kStateBlock] = {};
    BlockOfArray whole[UpdateArrays::kCount];
    for (int a = 0; a < UpdateArrays::kCount; ++a) {
      if (at[a].read) memcpy(padded[a], at[a].from, count * at[a].read);
      whole[a] = {padded[a], padded[a], at[a].read, at[a].written};
    }
    update(whole, block, drawn);
    for (int a = 0; a < UpdateArrays::kCount; ++a)
      if (at[a].written) memcpy(at[a].to, padded[a], count * at[a].written);
  }

  /// A block's elements; `block` is its number in the matrix, and `drawn` where its draws begin.
  __attribute__((always_inline)) void update(const BlockOfArray (&at)[UpdateArrays::kCount], int64_t block, int drawn) {
    const StateBlock g = p.g_type == ElementType::kBF16 ? load_block<BF16>(at[UpdateArrays::kG].from)
                                                        : load_block<Float>(at[UpdateArrays::kG].from);
    const StateBlock old = load_weights(at);
    StateBlock m = load_moment<true>(at[UpdateArrays::kMu].from, block), v;
    if constexpr (Rule::kHasNu) v = load_moment<false>(at[UpdateArrays::kNu].from, block);
    U32 above = U32{};  // the largest distance from kOrdinaryFrom; that of smaller and of negative numbers is huge
    JLP_UNROLL(8)
    for (int i = 0; i < kStateVectors; ++i) {
      const UpdateStep<F32> step = Rule::template moments<F32>(g.of[i], m.of[i], Rule::kHasNu ? v.of[i] : F32{}, scalars_);
      m.of[i] = step.m, v.of[i] = step.v;
      const U32 of_m = magnitude(step.m) - kOrdinaryFrom, of_v = L::bits(step.v) - kOrdinaryFrom;
      const U32 both = Rule::kHasNu ? (of_m > of_v ? of_m : of_v) : of_m;
      above = above > both ? above : both;
    }
    if (direction_.serves && all_at_most(above, kOrdinarySpan))
      finish<true>(at, m, v, old, block, drawn);
    else
      finish<false>(at, m, v, old, block, drawn);
  }

  template <bool kOrdinary>
  __attribute__((always_inline)) void finish(const BlockOfArray (&at)[UpdateArrays::kCount], const StateBlock& m,
                                             const StateBlock& v, const StateBlock& old, int64_t block, int drawn) {
    StateBlock change;
    JLP_UNROLL(8)
    for (int i = 0; i < kStateVectors; ++i)
      change.of[i] = update_along<F32>(direction_.template of<kOrdinary>(m.of[i], v.of[i], scalars_), old.of[i], scalars_);
    store_weights(at, old, change, draws_[1] + drawn);
    store_moment<true, kOrdinary>(p.mu, m, at[UpdateArrays::kMu].to, block, draws_[0] + drawn);
    if constexpr (Rule::kHasNu) store_moment<false, kOrdinary>(p.nu, v, at[UpdateArrays::kNu].to, block, draws_[0] + drawn);
  }

  template <bool kSigned>
  StateBlock load_moment(const uint8_t* from, int64_t block) const {
    const uint8_t* exponents = arrays_.exponents[!kSigned];
    return exponents ? decode_state<kSigned>(from, exponents[block]) : load_block<Float>(from);
  }
  template <bool kSigned, bool kOrdinary>
  void store_moment(const MomentState& moment, const StateBlock& x, uint8_t* to, int64_t block, const uint16_t* draws) {
    if (uint8_t* exponents = arrays_.new_exponents[!kSigned]) {
      exponents[block] = encode_state<kSigned, kOrdinary>(x, moment.stochastic ? draws : nullptr, to);
      return;
    }
    for (int i = 0; i < kStateVectors; ++i) store(to + 4 * i * kLanes, stored(x.of[i]));
  }

  StateBlock load_weights(const BlockOfArray (&at)[UpdateArrays::kCount]) const {
    const uint8_t *from = at[UpdateArrays::kP].from, *rest = at[UpdateArrays::kRest].from;
    switch (p.weight) {
      case WeightKind::kFloat32: return load_block<Float>(from);
      case WeightKind::kRest16: return join_weights<32>(from, rest);
      case WeightKind::kRest8: return join_weights<24>(from, rest);
      default: return load_block<BF16>(from);
    }
  }

  /// The weight that is changed, or its change.
  void store_weights(const BlockOfArray (&at)[UpdateArrays::kCount], const StateBlock& old, const StateBlock& change,
                     const uint16_t* draws) {
    const BlockOfArray& to = at[UpdateArrays::kP];
    if (p.weight == WeightKind::kFloat32) {
      for (int i = 0; i < kStateVectors; ++i)
        store(to.to + 4 * i * kLanes, stored(p.update ? change.of[i] : old.of[i] + change.of[i]));
      return;
    }
    U32 upper[kStateVectors], rest[kStateVectors];
    const auto each = [&](auto part) {
      JLP_UNROLL(8)
      for (int i = 0; i < kStateVectors; ++i) {
        const MasterParts<F32> parts = part(old.of[i] + change.of[i], i);
        upper[i] = parts.parameter, rest[i] = parts.rest;
      }
    };
    switch (p.weight) {
      case WeightKind::kRest16:
        each([](F32 w, int) { return master_split<32>(w); });
        for (int i = 0; i < kStateVectors; ++i) store_u16(at[UpdateArrays::kRest].to + 2 * i * kLanes, rest[i]);
        break;
      case WeightKind::kRest8:
        each([](F32 w, int) { return master_split<24>(w); });
        store_bytes(at[UpdateArrays::kRest].to, rest);
        break;
      case WeightKind::kDrawn:
        each([&](F32 w, int i) { return MasterParts<F32>{master_drawn(w, load_u16(draws + i * kLanes)), U32{}}; });
        break;
      default: each([](F32 w, int) { return MasterParts<F32>{master_nearest(w), U32{}}; });
    }
    if (!p.update) {
      for (int i = 0; i < kStateVectors; ++i) store_u16(to.to + 2 * i * kLanes, upper[i]);
      return;
    }
    const StateBlock before = load_block<BF16>(to.from);
    for (int i = 0; i < kStateVectors; ++i) store(to.to + 4 * i * kLanes, stored(bf16_decode<F32>(upper[i]) - before.of[i]));
  }

  const OptimizerUpdateProblem& p;
  const UpdateRows rows_;
  const UpdateArrays arrays_;
  const uint32_t* words_;
  const typename Rule::Scalars scalars_;
  const DirectionOf<Rule> direction_;
  alignas(64) uint16_t draws_[2][kRun * kStateBlock];
};

template <class Rule>
struct OptimizerUpdate {
  static int64_t chunks_per_matrix(const OptimizerUpdateProblem& p) {
    return divide_up(UpdateRows(p).blocks_of_matrix, blocks_of_chunk(p));
  }

  static void chunk(const OptimizerUpdateProblem& p, int64_t batch, int64_t chunk) {
    const UpdateRows rows(p);
    UpdatePass<Rule> pass(p, rows, batch);
    const int64_t first = chunk * blocks_of_chunk(p);
    const int64_t last = std::min(first + blocks_of_chunk(p), rows.blocks_of_matrix);
    int64_t row = first / rows.blocks, block = first % rows.blocks;
    for (int64_t at = first; at < last;) {
      const int64_t count = std::min({int64_t{UpdatePass<Rule>::kRun}, rows.blocks - block, last - at});
      pass.run(row, block, static_cast<int>(count));
      at += count, block += count;
      if (block == rows.blocks) block = 0, ++row;
    }
  }

 private:
  static int64_t blocks_of_chunk(const OptimizerUpdateProblem& p) {
    return elements_of_chunk(p.rows * p.columns) / kStateBlock;
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
