// Activations, plain and gated, and their gradients (numerics.md 12.1): the rules of numerics/activations.h, element by
// element.
//
// Data flow: a thread takes kActivationPieces pieces of 16 bytes of every operand, all loaded before the first is used ->
// float32 -> the rule -> each result rounded once. The last tile, and arrays that are not aligned, go one element at a time.
//
// Bytes moved per element of 16 bits, twice that of 32: silu 4, swiglu 6, their gradients 6 and 10.
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles of the arrays.
#pragma once

#include "../../numerics/activations.h"
#include "../launch_grid.cuh"
#include "pieces.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kActivationThreads = 256;
constexpr int kActivationPieces = 2;  // of each operand, a thread and tile

// What is computed of an element: from kOperands numbers kResults of them. A kernel with another arrangement of threads
// takes these, too.

/// x and, if it is gated, up -> the activation.
template <class Rule, bool kGated>
struct Activate {
  static constexpr int kOperands = 1 + kGated, kResults = 1;
  static constexpr bool kGradients = false;

  JLP_DEVICE void apply(const float (&v)[kOperands], float (&result)[kResults]) {
    result[0] = Rule::value(v[0]);
    if constexpr (kGated) result[0] = result[0] * v[1];
  }
};

/// dy, x and, if it is gated, up -> the gradients of x and up.
template <class Rule, bool kGated>
struct ActivateBackward {
  static constexpr int kOperands = 2 + kGated, kResults = 1 + kGated;
  static constexpr bool kGradients = true;

  JLP_DEVICE void apply(const float (&v)[kOperands], float (&result)[kResults]) {
    const auto found = Rule::with_slope(v[1]);
    if constexpr (kGated) {
      result[0] = (v[0] * v[2]) * found.slope, result[1] = v[0] * found.value;
    } else {
      result[0] = v[0] * found.slope;
    }
  }
};

/// A piece of each operand -> a piece of each result.
template <class P, class Rule>
JLP_DEVICE void apply_to_pieces(const typename P::Storage (&operands)[Rule::kOperands],
                                typename P::Storage (&results)[Rule::kResults]) {
  typename P::Values given[Rule::kOperands], found[Rule::kResults];
#pragma unroll
  for (int j = 0; j < Rule::kOperands; ++j) P::decode(operands[j], given[j]);
#pragma unroll
  for (int k = 0; k < P::kCount; ++k) {
    float v[Rule::kOperands], result[Rule::kResults];
#pragma unroll
    for (int j = 0; j < Rule::kOperands; ++j) v[j] = given[j][k];
    Rule::apply(v, result);
#pragma unroll
    for (int j = 0; j < Rule::kResults; ++j) found[j][k] = result[j];
  }
#pragma unroll
  for (int j = 0; j < Rule::kResults; ++j) results[j] = P::encode(found[j]);
}

template <class Rule>
struct ActivationArguments {
  const void* operands[Rule::kOperands];
  void* results[Rule::kResults];
  int64_t size;
  Tiles tiles;  // of one row
  bool aligned;
};

/// Pieces first, first + kActivationThreads, ... of the arrays.
template <ElementType kType, bool kWhole, class Rule, int kPieces>
JLP_DEVICE void activate(const ActivationArguments<Rule>& a, int64_t first) {
  using P = Piece<kType, kWhole>;
  typename P::Storage loaded[kPieces][Rule::kOperands];
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
#pragma unroll
    for (int j = 0; j < Rule::kOperands; ++j) loaded[i][j] = P::load(a.operands[j], first + i * kActivationThreads);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    typename P::Storage results[Rule::kResults];
    apply_to_pieces<P, Rule>(loaded[i], results);
#pragma unroll
    for (int j = 0; j < Rule::kResults; ++j) P::store(a.results[j], first + i * kActivationThreads, results[j]);
  }
}

template <ElementType kType, class Rule>
static __global__ void __launch_bounds__(kActivationThreads)
    activation_kernel(const __grid_constant__ ActivationArguments<Rule> a) {
  constexpr int kCount = Piece<kType, true>::kCount;
  constexpr int64_t kTile = int64_t{kActivationThreads} * kActivationPieces * kCount;
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = Tiles::next(a.tiles, at)) {
    const int64_t first = at.across * kTile;
    if (a.aligned && first + kTile <= a.size) {
      activate<kType, true, Rule, kActivationPieces>(a, first / kCount + threadIdx.x);
    } else {
      const int64_t last = min(first + kTile, a.size);
      for (int64_t i = first + threadIdx.x; i < last; i += kActivationThreads) activate<kType, false, Rule, 1>(a, i);
    }
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
