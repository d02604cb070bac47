// Hadamard transforms along rows (lanes) and columns (vectors), and the standalone transform (numerics.md 3).
// Bytes moved by the standalone transform: the input once, the output once.
#pragma once

#include "../../numerics/hadamard.h"
#include "../kernels.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// x plus or minus the lane `Distance` away: the butterfly within a vector.
template <int Distance>
JLP_RULE F32 butterfly_lanes(F32 x) {
  U32 upper;  // the sign bit in lanes that hold the second of their pair
  for (int i = 0; i < kLanes; ++i) upper[i] = (i & Distance) ? kSignBit : 0u;
  return shuffle<SwapLanes<Distance>>(x, x) + L::from_bits(L::bits(x) ^ upper);
}

/// The butterfly with the given stride over elements held in pairs, 2 * kLanes consecutive elements each.
template <int Stride>
JLP_RULE void butterfly_stride(Pair* v, int pairs) {
  constexpr int kDistance = Stride / (2 * kLanes);  // in vectors
  if constexpr (Stride == 1) {
    for (int i = 0; i < pairs; ++i) v[i] = {v[i].even + v[i].odd, v[i].even - v[i].odd};
  } else if constexpr (kDistance == 0) {
    for (int i = 0; i < pairs; ++i) v[i] = {butterfly_lanes<Stride / 2>(v[i].even), butterfly_lanes<Stride / 2>(v[i].odd)};
  } else {
    for (int start = 0; start < pairs; start += 2 * kDistance)
      for (int i = start; i < start + kDistance; ++i) {
        const Pair a = v[i], b = v[i + kDistance];
        v[i] = {a.even + b.even, a.odd + b.odd};
        v[i + kDistance] = {a.even - b.even, a.odd - b.odd};
      }
  }
}

/// v H for every N consecutive elements of `pairs` pairs.
template <int N, int Stride = 1>
JLP_RULE void butterfly_rows(Pair* v, int pairs) {
  if constexpr (Stride < N) {
    butterfly_stride<Stride>(v, pairs);
    butterfly_rows<N, 2 * Stride>(v, pairs);
  }
}

/// N^-1/2 rounded once.
constexpr float hadamard_scale(int n) {
  return n == 16 ? 0.25f : n == 32 ? 0.17677669529663688f : n == 64 ? 0.125f : n == 128 ? 0.08838834764831844f : 0.0625f;
}

template <class E, int N>
struct Hadamard {
  using Storage = typename E::Storage;
  static constexpr int kPiece = N > 2 * kLanes ? N : 2 * kLanes;  // elements along a row at a time
  static constexpr int kPiecePairs = kPiece / (2 * kLanes);
  static constexpr int64_t kRun = 32 * 1024 / kPiece * kPiece;
  static constexpr bool kWholeLines = N == 16 && 2 * kLanes * sizeof(Storage) >= 64;  // few enough to lie in the cache
  static constexpr int kColumns = kWholeLines ? 1024 : kPacket;                       // at a time

  static int64_t chunks_per_matrix(const HadamardProblem& p) {
    if (p.vertical) return p.rows / N * divide_up(p.columns, kColumns);
    return divide_up(p.rows * p.columns, kRun);
  }

  static void chunk(const HadamardProblem& p, int64_t batch, int64_t chunk) {
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    Storage* y = static_cast<Storage*>(p.result) + batch * p.rows * p.columns;
    uint32_t sign_bits[N];
    p.signs_of(batch, sign_bits);
    if (p.vertical) {
      const int64_t across = divide_up(p.columns, kColumns);
      return columns(p, sign_bits, x, y, chunk / across * N, chunk % across * kColumns);
    }
    rows(p, sign_bits, x, y, chunk * kRun, std::min((chunk + 1) * kRun, p.rows * p.columns));
  }

 private:
  static void rows(const HadamardProblem& p, const uint32_t* sign_bits, const Storage* x, Storage* y, int64_t first,
                   int64_t last) {
    Pair signs[kPiecePairs];
    uint32_t even[kLanes], odd[kLanes];
    for (int i = 0; i < kPiecePairs; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int element = (i * kLanes + lane) * 2;
        even[lane] = sign_bits[element % N], odd[lane] = sign_bits[(element + 1) % N];
      }
      signs[i] = {load<F32>(even), load<F32>(odd)};
    }
    for (; first + kPiece <= last; first += kPiece) piece(x + first, y + first, signs, p.inverse);
    if (first == last) return;
    alignas(64) Storage padded[kPiece] = {};  // whole transforms, but not a whole piece of them
    memcpy(padded, x + first, (last - first) * sizeof(Storage));
    piece(padded, padded, signs, p.inverse);
    memcpy(y + first, padded, (last - first) * sizeof(Storage));
  }

  JLP_RULE void piece(const Storage* x, Storage* y, const Pair* signs, bool inverse) {
    Pair v[kPiecePairs];
    for (int i = 0; i < kPiecePairs; ++i) {
      v[i] = E::load_pair(x + 2 * kLanes * i);
      if (!inverse) v[i] = flip(v[i], signs[i]);
    }
    butterfly_rows<N>(v, kPiecePairs);
    for (int i = 0; i < kPiecePairs; ++i) {
      v[i] = {v[i].even * hadamard_scale(N), v[i].odd * hadamard_scale(N)};
      if (inverse) v[i] = flip(v[i], signs[i]);
      E::store_pair(y + 2 * kLanes * i, v[i]);
    }
  }

  JLP_RULE Pair flip(Pair v, Pair signs) {
    return {L::from_bits(L::bits(v.even) ^ L::bits(signs.even)), L::from_bits(L::bits(v.odd) ^ L::bits(signs.odd))};
  }

  /// N rows of some columns. Unless whole cache lines are read and written, through a copy that lies together.
  static void columns(const HadamardProblem& p, const uint32_t* sign_bits, const Storage* x, Storage* y, int64_t row,
                      int64_t column) {
    int width = static_cast<int>(std::min<int64_t>(kColumns, p.columns - column));
    x += row * p.columns + column, y += row * p.columns + column;
    if constexpr (kWholeLines) {
      const int whole = width / (2 * kLanes) * (2 * kLanes);
      for (int j = 0; j < whole; j += 2 * kLanes) column_pairs(p, sign_bits, x + j, y + j, p.columns);
      x += whole, y += whole, width -= whole;
    }
    if (width == 0) return;
    auto* tile = reinterpret_cast<Storage(*)[kColumns]>(thread_scratch(N * kColumns * sizeof(Storage)));
    for (int r = 0; r < N; ++r) memcpy(tile[r], x + r * p.columns, width * sizeof(Storage));
    for (int j = 0; j < width; j += 2 * kLanes) column_pairs(p, sign_bits, &tile[0][j], &tile[0][j], kColumns);
    for (int r = 0; r < N; ++r) memcpy(y + r * p.columns, tile[r], width * sizeof(Storage));
  }

  /// 2 * kLanes columns.
  JLP_RULE void column_pairs(const HadamardProblem& p, const uint32_t* sign_bits, const Storage* x, Storage* y,
                             int64_t stride) {
    F32 even[N], odd[N];
    for (int r = 0; r < N; ++r) {
      const F32 sign = L::from_bits(fill<F32>(p.inverse ? 0u : sign_bits[r]));
      const Pair v = flip(E::load_pair(x + r * stride), {sign, sign});
      even[r] = v.even, odd[r] = v.odd;
    }
    butterfly_columns(even), butterfly_columns(odd);
    for (int r = 0; r < N; ++r) {
      const F32 sign = L::from_bits(fill<F32>(p.inverse ? sign_bits[r] : 0u));
      E::store_pair(y + r * stride, flip({even[r] * hadamard_scale(N), odd[r] * hadamard_scale(N)}, {sign, sign}));
    }
  }

  JLP_RULE void butterfly_columns(F32 (&v)[N]) {
    for (int start = 0; start < N; start += kBlock) hadamard_butterfly<kBlock>(v + start);
    for (int stride = kBlock; stride < N; stride *= 2)
      for (int start = 0; start < N; start += 2 * stride)
        for (int i = start; i < start + stride; ++i) {
          const F32 a = v[i], b = v[i + stride];
          v[i] = a + b;
          v[i + stride] = a - b;
        }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
