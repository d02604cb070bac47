// The operands of weight-only GEMMs in the lanes' order: float32 for all of them, or, where both operands
// are bfloat16 numbers and the processor multiplies pairs of those, pairs.
//
// Operands are handled 32 numbers at a time, two steps of the lanes.
#pragma once

#include <algorithm>

#include "../../problems.h"
#include "../elements.h"

#if defined(JLP_ISA_AVX512_BF16)
#include "../matmul/bf16_pair.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {

// Sums of products in 16 lanes, the order that weight-only GEMMs add in: lane j sums k = j, j + 16, ...; at the end j and
// j + 8 are added, then + 4, + 2, + 1. Each instruction set places lane j in its vectors where
// 4-bit codes unpack with the fewest instructions.

constexpr int kSums = 16;
constexpr int kUnpacked = 2 * kSums;    // numbers that are unpacked together
constexpr int kParts = kSums / kLanes;  // vectors that hold them

struct Sixteen {
  F32 part[kParts];
};

/// The lane at place `p`, counted through the parts.
constexpr int lane_at(int p) {
#if defined(JLP_ISA_AVX512)
  return p % 2 * 8 + p / 2;  // nibble p / 2 of word p % 2
#elif defined(JLP_ISA_AVX2)
  return p % 4 * 4 + p / 4;  // see AVX2's NibbleTable
#else
  return p / 8 * 8 + p % 4 * 2 + p / 4 % 2;  // four bytes' low nibbles, then their high ones
#endif
}

/// Places in order of k. A part's lanes lie in two vectors at most.
template <int kPart>
struct Arrangement {
  static constexpr int kFirst = kParts == 1 ? 0 : kPart / 2 * 2;
  static constexpr int at(int i) { return lane_at(kPart * kLanes + i) - kFirst * kLanes; }
};
template <int... kPart>
JLP_RULE Sixteen arrange(const F32 (&v)[kParts], std::integer_sequence<int, kPart...>) {
  return {
      {shuffle<Arrangement<kPart>>(v[Arrangement<kPart>::kFirst], v[kParts == 1 ? 0 : Arrangement<kPart>::kFirst + 1])...}};
}

/// Numbers in order of k.
JLP_RULE Sixteen arrange(const F32 (&v)[kParts]) { return arrange(v, std::make_integer_sequence<int, kParts>()); }

#if defined(JLP_ISA_AVX2)
/// The lower halves of 32-bit words as bfloat16 in part 0, the upper ones in part 1.
JLP_RULE Sixteen widen_words(__m256i halves) {
  return {
      {(F32)_mm256_slli_epi32(halves, 16), (F32)_mm256_and_si256(halves, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)))}};
}

/// bfloat16 in order of k.
JLP_RULE Sixteen arrange(__m256i halves) {
  const __m256i even_then_odd = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                                 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return widen_words(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(halves, even_then_odd), 0b11011000));
}
#endif

JLP_RULE Sixteen load_sixteen(const float* p) {
  Sixteen v;
  JLP_UNROLL(4)
  for (int i = 0; i < kParts; ++i) v.part[i] = load<F32>(p + i * kLanes);
  return v;
}

JLP_RULE void store_sixteen(float* p, const Sixteen& v) {
  JLP_UNROLL(4)
  for (int i = 0; i < kParts; ++i) store(p + i * kLanes, v.part[i]);
}

/// g++ otherwise makes a load of every use as an operand: more than the processor has ports for.
template <class V>
JLP_RULE void keep_in_register([[maybe_unused]] V& v) {
#if (defined(JLP_ISA_AVX512) || defined(JLP_ISA_AVX2)) && !defined(JLP_EMULATE_AVX512)
  asm("" : "+v"(v));
#endif
}

/// sums += x * w, each product and addition rounded once.
JLP_RULE void add_products(Sixteen& sums, const Sixteen& x, const Sixteen& w) {
  JLP_UNROLL(4)
  for (int i = 0; i < kParts; ++i) sums.part[i] = L::fused_multiply_add(x.part[i], w.part[i], sums.part[i]);
}

template <int kDistance>
JLP_RULE F32 add_neighbours(F32 v) {
  return v + shuffle<SwapLanes<kDistance>>(v, v);
}

/// The tree of additions.
JLP_RULE float total(const Sixteen& sums) {
#if defined(JLP_ISA_AVX512)
  return add_neighbours<2>(add_neighbours<4>(add_neighbours<8>(add_neighbours<1>(sums.part[0]))))[0];
#elif defined(JLP_ISA_AVX2)
  const F32 low = add_neighbours<1>(add_neighbours<2>(sums.part[0]));
  const F32 high = add_neighbours<1>(add_neighbours<2>(sums.part[1]));
  return add_neighbours<4>(low + high)[0];
#else
  const F32 even = sums.part[0] + sums.part[2], odd = sums.part[1] + sums.part[3];
  return (add_neighbours<1>(add_neighbours<2>(even)) + add_neighbours<1>(add_neighbours<2>(odd)))[0];
#endif
}

/// Operands as float32.
struct Numbers {
  using Unit = float;
  using Vector = F32;
  using Unpacked = Sixteen[2];
  static constexpr int64_t kPerUnit = 1;

  JLP_RULE F32 multiply_add(F32 x, F32 w, F32 sums) { return L::fused_multiply_add(x, w, sums); }
  JLP_RULE float total(const Sixteen& sums) { return JLP_ISA::total(sums); }

  /// sums += x * w for 32 numbers, x in scratch memory.
  JLP_RULE void add_unpacked(Sixteen& sums, const float* x, const Unpacked& w) {
    JLP_UNROLL(2)
    for (int i = 0; i < 2; ++i) add_products(sums, load_sixteen(x + i * kSums), w[i]);
  }
  JLP_RULE void store_unpacked(float* out, int64_t apart, const Unpacked& w) {
    store_sixteen(out, w[0]), store_sixteen(out + apart, w[1]);
  }

  /// Calls visit with the traits of a type of x.
  template <class Visit>
  JLP_RULE void with_element(ElementType type, Visit visit) {
    JLP_ISA::with_element(type, visit);
  }

  /// A row of x from `k` on, zeros beyond its end up to k + count; every kSums units of it begin `apart` units on.
  template <class E>
  __attribute__((noinline)) static void arrange_row(const WeightOnlyProblem& p, int64_t row, int64_t k, int64_t count,
                                                    int64_t apart, float* out) {
    const auto* x = static_cast<const typename E::Storage*>(p.x) + row * p.depth;
    for (int64_t at = 0; at < count; at += kSums, out += apart) {
#if defined(JLP_ISA_AVX2)
      if constexpr (std::is_same_v<E, BF16>) {
        if (k + at + kSums <= p.depth) {
          store_sixteen(out, arrange(load<__m256i>(x + k + at)));
          continue;
        }
      }
#endif
      F32 numbers[kParts];
      for (int i = 0; i < kParts; ++i) {
        const int64_t from = k + at + i * kLanes, left = std::clamp<int64_t>(p.depth - from, 0, kLanes);
        numbers[i] = L::flush(
            left == kLanes ? E::load_lanes(x + from)
                           : load_elements(p.x, p.x_type, row * p.depth + std::min(from, p.depth), static_cast<int>(left)));
      }
      store_sixteen(out, arrange(numbers));
    }
  }
};

#if defined(JLP_ISA_AVX512_BF16)
/// Where the halves of pairs come from, upper halves being of the first step: 16-bit places in memory order, the lower half
/// of a lane first. Unlike those of float32, lanes are in order of k.
struct PairOrder {
  alignas(64) uint8_t code[2 * kUnpacked] = {};  // of 32 8-bit codes: a half's, twice
  alignas(64) uint16_t number[kUnpacked] = {};   // of 32 in order of k
  alignas(64) uint8_t byte[2 * kUnpacked] = {};  // of 16 bytes of 4-bit codes: the two bytes that hold a half's code,
  alignas(64) uint16_t shift[kUnpacked] = {};    // and how many bits below it
  // Of a line, 64 bytes of 4-bit codes: into each 8 bytes those that two lanes take for four pairs;
  alignas(64) uint8_t line[64] = {};
  alignas(64) uint8_t field[4][64] = {};  // and for each of the four, at which bit of the 8 bytes a byte's code is

  constexpr PairOrder() {
    for (int half = 0; half < kUnpacked; ++half) {
      const int k = half / 2 + (half % 2 ? 0 : kSums);
      code[2 * half] = code[2 * half + 1] = k, number[half] = k, shift[half] = k % 4 * 4;
      byte[2 * half] = k / 4 * 2, byte[2 * half + 1] = k / 4 * 2 + 1;
    }
    for (int i = 0; i < 64; ++i) {
      line[i] = i % 8 * 8 + i / 8;
      const int upper = i / 2 % 2, odd_lane = i / 4 % 2;
      for (int pair = 0; pair < 4; ++pair) field[pair][i] = 16 * pair + (upper ? 0 : 8) + 4 * odd_lane;
    }
  }
};
constexpr PairOrder kPairOrder;

/// Operands as pairs of bfloat16: a lane's number of the first step in the upper half, that of the second in the lower one.
struct Pairs {
  using Unit = uint32_t;
  using Vector = U32;
  using Unpacked = U32;
  static constexpr int64_t kPerUnit = 2;

  JLP_RULE F32 multiply_add(U32 x, U32 w, F32 sums) { return add_products_of_pairs(x, w, sums); }
  JLP_RULE float total(const Sixteen& sums) {
    return add_neighbours<1>(add_neighbours<2>(add_neighbours<4>(add_neighbours<8>(sums.part[0]))))[0];
  }

  /// From numbers in float32's order of lanes.
  JLP_RULE U32 of_numbers(const Sixteen (&w)[2]) {
    const F32 pairs = (F32)pair(w[0].part[0], w[1].part[0]);
    return L::bits(shuffle<InOrder>(pairs, pairs));
  }

  JLP_RULE void add_unpacked(Sixteen& sums, const uint32_t* x, U32 w) {
    sums.part[0] = multiply_add(load<U32>(x), w, sums.part[0]);
  }
  JLP_RULE void store_unpacked(uint32_t* out, int64_t, U32 w) { store(out, w); }

  template <class Visit>
  JLP_RULE void with_element(ElementType, Visit visit) {
    visit(BF16{});
  }

  /// As Numbers::arrange_row.
  template <class E>
  __attribute__((noinline)) static void arrange_row(const WeightOnlyProblem& p, int64_t row, int64_t k, int64_t count,
                                                    int64_t apart, uint32_t* out) {
    static_assert(std::is_same_v<E, BF16>);
    const __m512i order = _mm512_load_si512(kPairOrder.number);
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * p.depth + k;
    const int64_t exist = std::min(count, p.depth - k), whole = exist / kUnpacked * kUnpacked;
    for (int64_t at = 0; at < whole; at += kUnpacked, out += apart)
      store(out, (U32)_mm512_permutexvar_epi16(order, load<__m512i>(x + at)));
    if (whole == count) return;
    uint16_t last[kUnpacked] = {};
    memcpy(last, x + whole, (exist - whole) * sizeof *x);
    store(out, (U32)_mm512_permutexvar_epi16(order, load<__m512i>(last)));
  }

 private:
  struct InOrder {
    static constexpr int at(int lane) { return lane % 8 * 2 + lane / 8; }
  };
};
#endif

}  // namespace JLP_ISA
}  // namespace jaxlowprec
