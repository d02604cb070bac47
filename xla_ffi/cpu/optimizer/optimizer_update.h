// AdamW and Lion in one pass (numerics.md 19). A run of at most 512 elements of a row is read and decoded, updated, encoded
// and written where it was read; between these stages it lies in arrays of float32 that the first cache holds. How moments
// and weights are kept is known at run time and asked once for each stage, which is a short loop: its constants stay in
// registers. Bytes moved per element: with 8-bit moments and remainders of 16 bits, 2 for the gradient of bfloat16 and 12.1
// read and written; with float32 throughout, 28.
#pragma once

#include "../../numerics/optimizer_states.h"
#include "../quantize/random.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kStateVectors = kStateBlock / kLanes;
constexpr int kRunBlocks = 16, kRunVectors = kRunBlocks * kStateVectors;

/// An array's elements from one on: where they are read, and where the new ones go.
struct Place {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  int read = 0, written = 0;  // bytes of an element; 0: there are none

  Place at(int64_t element) const { return {from + element * read, to + element * written, read, written}; }
};

/// The arrays of a problem, from the first element of a matrix.
struct UpdateArrays {
  enum { kG, kP, kRest, kMu, kNu, kCount };
  Place of[kCount];
  const uint8_t* exponents[2];
  uint8_t* new_exponents[2];

  UpdateArrays(const OptimizerUpdateProblem& p, int64_t batch) {
    const auto array = [](const void* from, void* to, int read, int written) {
      return Place{static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to), from ? read : 0, to ? written : 0};
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
    for (Place& a : of) a = a.at(batch * p.rows * p.columns);
  }
};

// --- the stages of a run

/// visit(i) for each vector of so many blocks.
template <class Visit>
JLP_RULE void for_vectors(int blocks, Visit visit) {
  for (int b = 0; b < blocks; ++b) {
    JLP_UNROLL(8)
    for (int i = 0; i < kStateVectors; ++i) visit(b * kStateVectors + i);
  }
}

/// float32 numbers of a run, perhaps where they are stored.
struct Numbers {
  const float* from;

  F32 operator[](int i) const { return load<F32>(from + i * kLanes); }
};
JLP_RULE Numbers numbers(const void* from) { return {static_cast<const float*>(from)}; }

JLP_RULE F32 load_bf16(const uint8_t* from, int i) {
  return BF16::load_lanes(reinterpret_cast<const uint16_t*>(from) + i * kLanes);
}

template <bool kSigned>
JLP_RULE void decode_states(const uint8_t* codes, const uint8_t* exponents, int blocks, F32* to) {
  for (int b = 0; b < blocks; ++b, codes += kStateBlock, to += kStateVectors) {
    const uint32_t exponent = exponents[b];
    JLP_UNROLL(8)
    for (int i = 0; i < kStateVectors; ++i) to[i] = state_decode<kSigned, F32>(load_u8(codes + i * kLanes), exponent);
  }
}

/// The low bytes of a block's lanes.
JLP_RULE void store_bytes(uint8_t* to, const U32* v) {
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

/// Encodes a block and returns its exponent. `d`: what state_rank takes, of each element. kOrdinary: see there.
template <bool kSigned, bool kOrdinary>
JLP_RULE uint8_t encode_states(const F32* x, const U32* d, uint8_t* codes) {
  U32 rank[kStateVectors], most = U32{};
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i) {
    rank[i] = state_rank<kSigned, kOrdinary>(x[i], d[i]);
    most = max_magnitude(most, rank[i]);
  }
  const U32 exponent = state_exponent<F32>(largest_of_lanes(most));
  JLP_UNROLL(8)
  for (int i = 0; i < kStateVectors; ++i) rank[i] = state_code<kSigned, kOrdinary>(x[i], rank[i], exponent);
  store_bytes(codes, rank);
  return static_cast<uint8_t>(exponent[0]);
}

template <int kBits>
JLP_RULE void join_weights(const uint8_t* p, const uint8_t* rest, int blocks, F32* to) {
  for_vectors(blocks, [&](int i) {
    const U32 low = kBits == 24 ? load_u8(rest + i * kLanes) : load_u16(rest + 2 * i * kLanes);
    to[i] = master_join<kBits, F32>(load_u16(p + 2 * i * kLanes), low);
  });
}

JLP_RULE F32 stored(F32 x) { return L::from_bits(stored_bits(x)); }

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
  const __m512i above = (__m512i)(v > most);
  return _mm512_test_epi32_mask(above, above) == 0;
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

/// Quotients of moments.
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
  UpdatePass(const OptimizerUpdateProblem& given, const UpdateRows& rows, int64_t batch)
      : p(given),
        rows_(rows),
        arrays_(given, batch),
        words_(given.words ? given.words + 4 * batch : nullptr),
        scalars_(load<typename Rule::Scalars>(p.scalars + kUpdateScalars<Rule> * batch)),
        direction_(scalars_) {
    for (U32& d : to_nearest_) d = fill<F32>(kStateToNearest);
  }

  /// Blocks of a row from `block` on that make the next run: whole ones, at most `most`, or the part at the row's end.
  int64_t blocks_of_run(int64_t block, int64_t most) const {
    const int64_t whole = rows_.columns / kStateBlock - block;
    return whole > 0 ? std::min({int64_t{kRunBlocks}, whole, most}) : 1;
  }

  void run(int64_t row, int64_t block, int blocks) {
    if (words_) draw(row, block, blocks);
    Place at[UpdateArrays::kCount];
    for (int a = 0; a < UpdateArrays::kCount; ++a) at[a] = arrays_.of[a].at(row * rows_.columns + block * kStateBlock);
    const int64_t left = rows_.columns - block * kStateBlock;
    if (left >= kStateBlock)
      update(at, row * rows_.blocks + block, blocks);
    else
      update_part(at, static_cast<int>(left), row * rows_.blocks + block);
  }

 private:
  void draw(int64_t row, int64_t block, int blocks) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    alignas(64) Four eighths[kRunBlocks] = {};  // of each block
    for (int b = 0; b < blocks; ++b) eighths[b] = p.block_numbers[block + b] * 4 + Four{0, 1, 2, 3};
    alignas(64) uint16_t draws[kRunBlocks * kStateBlock];
    const auto draw_of = [&](int which, uint16_t* to) {
      for (int i = 0; i < 4 * blocks; i += kLanes) {
        U32 counter[4] = {load<U32>(eighths + i / 4), fill<F32>(p.row_numbers[row]), fill<F32>(kDrawnHalves), U32{}};
        philox(counter, words_[2 * which], words_[2 * which + 1]);
        store_in_turns(to + kDrawsOfCall * i, counter);
      }
    };
    if (p.mu.stochastic || p.nu.stochastic) {
      draw_of(0, draws);
      for_vectors(blocks, [&](int i) { drawn_[i] = state_rounding<F32>(load_u16(draws + i * kLanes)); });
    }
    if (p.weight == WeightKind::kDrawn) draw_of(1, weight_draws_);
  }

  /// A row's last block, of fewer elements: the others are zeros, whose codes change no exponent.
  __attribute__((noinline)) void update_part(const Place (&at)[UpdateArrays::kCount], int count, int64_t block) {
    alignas(64) uint8_t from[UpdateArrays::kCount][4 * kStateBlock] = {}, to[UpdateArrays::kCount][4 * kStateBlock];
    Place whole[UpdateArrays::kCount];
    for (int a = 0; a < UpdateArrays::kCount; ++a) {
      if (at[a].read) memcpy(from[a], at[a].from, count * at[a].read);
      whole[a] = {from[a], to[a], at[a].read, at[a].written};
    }
    update(whole, block, 1);
    for (int a = 0; a < UpdateArrays::kCount; ++a)
      if (at[a].written) memcpy(at[a].to, to[a], count * at[a].written);
  }

  /// `block`: the first one's number in the matrix.
  void update(const Place (&at)[UpdateArrays::kCount], int64_t block, int blocks) {
    load_gradients(at[UpdateArrays::kG].from, blocks);
    load_weights(at, blocks);
    const Numbers m = load_moment<true>(at[UpdateArrays::kMu].from, block, blocks, m_);
    const Numbers v = Rule::kHasNu ? load_moment<false>(at[UpdateArrays::kNu].from, block, blocks, v_) : m;
    if (step(m, v, blocks) && direction_.serves)
      finish<true>(at, block, blocks);
    else
      finish<false>(at, block, blocks);
  }

  void load_gradients(const uint8_t* from, int blocks) {
    g_ = numbers(p.g_type == ElementType::kF32 ? static_cast<const void*>(from) : gradient_);
    if (p.g_type == ElementType::kBF16) for_vectors(blocks, [&](int i) { gradient_[i] = load_bf16(from, i); });
  }

  template <bool kSigned>
  Numbers load_moment(const uint8_t* from, int64_t block, int blocks, F32* decoded) const {
    const uint8_t* exponents = arrays_.exponents[!kSigned];
    if (!exponents) return numbers(from);
    decode_states<kSigned>(from, exponents + block, blocks, decoded);
    return numbers(decoded);
  }

  void load_weights(const Place (&at)[UpdateArrays::kCount], int blocks) {
    const uint8_t *from = at[UpdateArrays::kP].from, *rest = at[UpdateArrays::kRest].from;
    old_ = numbers(p.weight == WeightKind::kFloat32 ? static_cast<const void*>(from) : weight_);
    switch (p.weight) {
      case WeightKind::kFloat32: return;
      case WeightKind::kRest16: return join_weights<32>(from, rest, blocks, weight_);
      case WeightKind::kRest8: return join_weights<24>(from, rest, blocks, weight_);
      default: return for_vectors(blocks, [&](int i) { weight_[i] = load_bf16(from, i); });
    }
  }

  /// Makes the new moments. Returns whether all of them are ordinary.
  bool step(Numbers m, Numbers v, int blocks) {
    const Numbers g = g_;  // copied, as all that loops read: a store of bytes could change the member
    const typename Rule::Scalars s = scalars_;
    U32 above = U32{};  // the largest distance from kOrdinaryFrom; that of smaller and of negative numbers is huge
    for_vectors(blocks, [&](int i) {
      const UpdateStep<F32> step = Rule::template moments<F32>(g[i], m[i], Rule::kHasNu ? v[i] : F32{}, s);
      m_[i] = step.m, v_[i] = step.v;
      const U32 of_m = magnitude(step.m) - kOrdinaryFrom, of_v = L::bits(step.v) - kOrdinaryFrom;
      const U32 both = Rule::kHasNu ? (of_m > of_v ? of_m : of_v) : of_m;
      above = above > both ? above : both;
    });
    return all_at_most(above, kOrdinarySpan);
  }

  template <bool kOrdinary>
  void finish(const Place (&at)[UpdateArrays::kCount], int64_t block, int blocks) {
    const typename Rule::Scalars s = scalars_;
    const DirectionOf<Rule> direction = direction_;
    const Numbers old = old_;
    for (int b = 0; b < blocks; ++b) {  // divisions take long: codes are made at the same time
      const int first = b * kStateVectors;
      JLP_UNROLL(8)
      for (int i = first; i < first + kStateVectors; ++i)
        change_[i] = update_along<F32>(direction.template of<kOrdinary>(m_[i], v_[i], s), old[i], s);
      store_moment<true, kOrdinary>(p.mu, at[UpdateArrays::kMu], m_ + first, first, block + b);
      if constexpr (Rule::kHasNu) store_moment<false, kOrdinary>(p.nu, at[UpdateArrays::kNu], v_ + first, first, block + b);
    }
    store_weights(at, blocks);
  }

  /// Of the block that begins with so many vectors.
  template <bool kSigned, bool kOrdinary>
  void store_moment(const MomentState& moment, const Place& at, const F32* x, int first, int64_t block) {
    uint8_t* to = at.to + first * kLanes * at.written;
    if (uint8_t* exponents = arrays_.new_exponents[!kSigned]) {
      exponents[block] = encode_states<kSigned, kOrdinary>(x, moment.stochastic ? drawn_ + first : to_nearest_, to);
      return;
    }
    JLP_UNROLL(8)
    for (int i = 0; i < kStateVectors; ++i) store(to + 4 * i * kLanes, stored(x[i]));
  }

  /// The weights that are changed, or their changes.
  void store_weights(const Place (&at)[UpdateArrays::kCount], int blocks) {
    const uint8_t* from = at[UpdateArrays::kP].from;
    uint8_t *to = at[UpdateArrays::kP].to, *rest = at[UpdateArrays::kRest].to;
    const bool is_update = p.update;
    const Numbers old = old_;
    if (p.weight == WeightKind::kFloat32)
      return for_vectors(blocks,
                         [&](int i) { store(to + 4 * i * kLanes, stored(is_update ? change_[i] : old[i] + change_[i])); });
    const auto each = [&](auto upper_of) {  // bfloat16
      if (is_update)
        for_vectors(blocks, [&](int i) {
          const F32 now = bf16_decode<F32>(upper_of(old[i] + change_[i], i));
          store(to + 4 * i * kLanes, stored(now - load_bf16(from, i)));
        });
      else
        for_vectors(blocks, [&](int i) { store_u16(to + 2 * i * kLanes, upper_of(old[i] + change_[i], i)); });
    };
    switch (p.weight) {
      case WeightKind::kRest16:
        return each([&](F32 w, int i) {
          const MasterParts<F32> parts = master_split<32>(w);
          store_u16(rest + 2 * i * kLanes, parts.rest);
          return parts.parameter;
        });
      case WeightKind::kRest8:
        each([&](F32 w, int i) {
          const MasterParts<F32> parts = master_split<24>(w);
          rest_[i] = parts.rest;
          return parts.parameter;
        });
        for (int b = 0; b < blocks; ++b) store_bytes(rest + b * kStateBlock, rest_ + b * kStateVectors);
        return;
      case WeightKind::kDrawn:
        return each([&](F32 w, int i) { return master_drawn(w, load_u16(weight_draws_ + i * kLanes)); });
      default: return each([&](F32 w, int) { return master_nearest(w); });
    }
  }

  const OptimizerUpdateProblem& p;
  const UpdateRows rows_;
  const UpdateArrays arrays_;
  const uint32_t* words_;
  const typename Rule::Scalars scalars_;
  const DirectionOf<Rule> direction_;
  Numbers g_, old_;  // gradients and weights of the run
  F32 gradient_[kRunVectors], weight_[kRunVectors], m_[kRunVectors], v_[kRunVectors], change_[kRunVectors];
  U32 drawn_[kRunVectors], rest_[kRunVectors], to_nearest_[kStateVectors];
  alignas(64) uint16_t weight_draws_[kRunBlocks * kStateBlock];
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
      const int64_t count = pass.blocks_of_run(block, last - at);
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
