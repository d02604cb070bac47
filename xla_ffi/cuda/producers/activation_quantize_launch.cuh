// From the operands of an activation, or of its gradients, to a launch of one of their kernels.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "../quantize/pow2_tiles.cuh"
#include "../quantize/quantize_launch.cuh"
#include "../quantize/quantize_tiles.cuh"
#include "activations.cuh"

namespace jaxlowprec {
namespace cuda {

// Activations and their gradients that are quantised and not stored, to MXFP8, MXFP4 and Float8Block: bytes are those of the
// activation's kernel and then the quantisation's (numerics.md 12.1 and 4 to 7).
//
// Data flow: the tiles of quantize_tiles.cuh, or of pow2_tiles.cuh where they serve, hold the first operand; for the
// gradients of gate and up, the first two. Each thread replaces the chunks of 16 bytes that it has copied there by results,
// rounded to the elements' type. It loads the other operands' chunks itself, those of its next row while it computes one.
// Then the results are quantised in turn.
//
// Bytes moved per element: the operands once, and what quantisation writes. Of 16 bits, both ways to MXFP8: silu 4, swiglu
// 6, their gradients 6 and 10, and the scales; stored and then quantised 8, 10, 10 and 18. Two tiles of float32 are 128 KiB,
// more than some GPUs have: the gradients of gate and up take a launch each, which moves 24 instead of 32.
//
// Launch: as those.

/// What is computed of the operands: an activation, or the gradients of some of them.
enum class Makes : int32_t { kPlain, kGated, kGradient, kGradientOfGate, kGradientOfUp, kGradientsOfBoth };

/// Result i takes the place of operand i, `results[i].x`, in tile i. Result: QuantizeArguments or WholeTilesArguments.
template <class Result, int kTiles>
struct ActivationQuantizeArguments {
  Result results[kTiles];  // their own `tiles` are not set
  Tiles tiles;
  const void* others[2];  // the operands that are in no tile
  bool whole;             // rows of all operands begin at multiples of 16 bytes
  ActivationKind kind;
  Makes makes;
};

/// One of the gradients that ActivateBackward gives of a gated activation; that of up needs no up.
template <class Rule, bool kOfUp>
struct ActivateBackwardOne {
  static constexpr int kOperands = kOfUp ? 2 : 3, kResults = 1;

  JLP_DEVICE void apply(const float (&v)[kOperands], float (&result)[kResults]) {
    float both[2];
    ActivateBackward<Rule, true>::apply({v[0], v[1], kOfUp ? 0.0f : v[kOperands - 1]}, both);
    result[0] = both[kOfUp];
  }
};

/// Replaces what this thread has copied by results. What is beyond the matrix stays zero: so is each result of zeros.
/// Chunks: Tile or OwnChunks.
template <class E, class Rule, class Arguments, class Chunks>
JLP_DEVICE void apply_to_tiles(const Arguments& a, const TileCorner& at, Chunks (&tiles)[Rule::kResults]) {
  using P = Piece<E::kType, true>;
  constexpr int kTiles = Rule::kResults, kOthers = Rule::kOperands - kTiles;
  const int64_t columns = a.results[0].columns;
  const int first = Chunks::own_chunk() * P::kCount, left = at.columns_left - first;
  if (left <= 0) return;
  const int64_t start = (at.batch * a.results[0].rows + at.row) * columns + at.column + first;
  uint4 others[kOthers + 1];
  const auto load = [&](int row) {
#pragma unroll
    for (int j = 0; j < kOthers; ++j)
      others[j] =
          Tile<E>::load_chunk(static_cast<const typename E::Storage*>(a.others[j]) + start + row * columns, left, a.whole);
  };
  int row = Chunks::own_row();
  if (row < at.rows_left) load(row);
#pragma unroll 1
  while (row < at.rows_left) {
    uint4 operands[Rule::kOperands], results[kTiles];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) operands[j] = tiles[j].own(row);
#pragma unroll
    for (int j = 0; j < kOthers; ++j) operands[kTiles + j] = others[j];
    const int current = row;
    row += Chunks::kOwnRows;
    if (row < at.rows_left) load(row);
    apply_to_pieces<P, Rule>(operands, results);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) tiles[j].own(current) = results[j];
  }
}

/// The activation of tiles of its first operand.
template <class E, class Arguments, class Chunks>
JLP_DEVICE void activate_tiles(const Arguments& a, const TileCorner& at, Chunks (&tiles)[1]) {
  with_rule(a.kind, [&](auto rule) {
    if (a.makes == Makes::kGated)
      apply_to_tiles<E, Activate<decltype(rule), true>>(a, at, tiles);
    else
      apply_to_tiles<E, Activate<decltype(rule), false>>(a, at, tiles);
  });
}

/// The gradients of tiles of dy, and of x where there are two.
template <class E, int kTiles, class Arguments, class Chunks>
JLP_DEVICE void activate_tiles_backward(const Arguments& a, const TileCorner& at, Chunks (&tiles)[kTiles]) {
  with_rule(a.kind, [&](auto rule) {
    using Rule = decltype(rule);
    if constexpr (kTiles == 2) {
      apply_to_tiles<E, ActivateBackward<Rule, true>>(a, at, tiles);
    } else if constexpr (E::kBytes == 2) {
      apply_to_tiles<E, ActivateBackward<Rule, false>>(a, at, tiles);
    } else {
      if (a.makes == Makes::kGradientOfUp)
        apply_to_tiles<E, ActivateBackwardOne<Rule, true>>(a, at, tiles);
      else if (a.makes == Makes::kGradientOfGate)
        apply_to_tiles<E, ActivateBackwardOne<Rule, false>>(a, at, tiles);
      else
        apply_to_tiles<E, ActivateBackward<Rule, false>>(a, at, tiles);
    }
  });
}

/// One less than quantize_tiles has: the rules need registers, too.
template <class E, bool kStochastic>
constexpr int kActivationTileBlocks = E::kBytes == 4 || kStochastic ? 2 : 3;

template <class E, class Code, bool kStochastic>
__global__ void __launch_bounds__(kTileThreads, kActivationTileBlocks<E, kStochastic>)
    quantize_activation_tiles(const __grid_constant__ ActivationQuantizeArguments<QuantizeArguments, 1> a) {
  quantize_each_tile<E, Code, Scales::kOne, kStochastic, false, 1>(
      a.tiles, a.results, [&](const TileCorner& at, auto& tiles) { activate_tiles<E>(a, at, tiles); });
}

template <class Code, int kBlock>
__global__ void __launch_bounds__(kPow2TileThreads, kPow2TileBlocks)
    quantize_activation_pow2_tiles(const __grid_constant__ ActivationQuantizeArguments<WholeTilesArguments, 1> a) {
  quantize_each_pow2_tile<Code, kBlock, 1>(
      a.tiles, a.results, [&](TilePlace at, auto& tiles) { activate_tiles<BF16>(a, TileCorner::of_whole(at), tiles); });
}

/// An sm_90 holds two blocks with two tiles of 16 bits each; sm_80 and sm_120 hold one.
template <class E, int kTiles>
constexpr int kGradientTileBlocks = kTiles == 1                    ? kActivationTileBlocks<E, false>
                                    : kArch < 900 || kArch >= 1200 ? 1
                                                                   : 2;

template <class E, class Code, int kTiles>
__global__ void __launch_bounds__(kTileThreads, kGradientTileBlocks<E, kTiles>)
    quantize_gradient_tiles(const __grid_constant__ ActivationQuantizeArguments<QuantizeArguments, kTiles> a) {
  quantize_each_tile<E, Code, Scales::kOne, false, false, kTiles>(
      a.tiles, a.results, [&](const TileCorner& at, auto& tiles) { activate_tiles_backward<E, kTiles>(a, at, tiles); });
}

template <class Code, int kBlock, int kTiles>
__global__ void __launch_bounds__(kPow2TileThreads, kPow2TileBlocks)
    quantize_gradient_pow2_tiles(const __grid_constant__ ActivationQuantizeArguments<WholeTilesArguments, kTiles> a) {
  quantize_each_pow2_tile<Code, kBlock, kTiles>(a.tiles, a.results, [&](TilePlace at, auto& tiles) {
    activate_tiles_backward<BF16, kTiles>(a, TileCorner::of_whole(at), tiles);
  });
}

/// kResults matrices, quantised alike, and the operands that they are made of; null after the last.
template <int kResults>
struct MadeOf {
  const QuantizeProblem* results;
  const void* operands[kResults + 2];
  ActivationKind kind;
  Makes makes;

  /// One of them, with the operand whose place it takes.
  QuantizeProblem result(int i) const {
    QuantizeProblem q = results[i];
    q.x = operands[i];
    return q;
  }
};

/// Result: QuantizeArguments or WholeTilesArguments, which are those of a problem by `arguments`.
template <class Result, int kTiles, class ArgumentsOf>
ActivationQuantizeArguments<Result, kTiles> arguments_of(const MadeOf<kTiles>& made, ArgumentsOf arguments) {
  ActivationQuantizeArguments<Result, kTiles> a{};
  a.kind = made.kind, a.makes = made.makes;
  for (int i = 0; i < kTiles; ++i) a.results[i] = arguments(made.result(i));
  std::copy_n(made.operands + kTiles, 2, a.others);
  a.whole = aligned(a.others[0], 16) && aligned(a.others[1], 16);
  return a;
}

template <auto kKernel, class E, class Code, bool kStochastic, int kTiles>
cudaError_t launch_made(const MadeOf<kTiles>& made, cudaStream_t stream) {
  using Shared = TilesShared<E, Code, Scales::kOne, kStochastic, kTiles>;
  static_assert(sizeof(Shared) <= 99 * 1024, "what a block can have on sm_86, sm_89 and sm_120");
  auto a = arguments_of<QuantizeArguments>(made, quantize_arguments<E, Code>);
  const QuantizeArguments& q = a.results[0];
  a.whole = a.whole && q.pieces;
  if (!cut(made.results->batch, divide_up(q.rows, kTile), divide_up(q.columns, kTile), a.tiles))
    return cudaErrorInvalidValue;
  return launch_over_tiles<kKernel, Shared>(kTileThreads, a, stream);
}

/// The block of all results' tiles if the kernels of pow2_tiles.cuh serve them; else 0.
template <class E, class Code, int kTiles>
int pow2_block_of(const MadeOf<kTiles>& made) {
  if constexpr (std::is_same_v<E, BF16>) {
    bool whole = true;
    for (int i = 0; i < kTiles; ++i) whole = whole && whole_tiles(made.result(i));
    return whole ? pow2_block<Code>(made.results->format) : 0;
  } else {
    return 0;
  }
}

template <auto kKernel, class Code, int kTiles>
cudaError_t launch_pow2_made(const MadeOf<kTiles>& made, cudaStream_t stream) {
  const auto a = arguments_of<WholeTilesArguments>(made, whole_tiles_arguments);
  return launch_pow2_tiles<kKernel, Code>(made.result(0), a, stream);
}

/// Calls visit with the types of the elements and of the codes.
template <class Visit>
cudaError_t with_element_and_code(const QuantizeProblem& p, Visit visit) {
  if (!random_fits(p)) return cudaErrorInvalidValue;
  if (p.batch * p.rows * p.columns == 0) return cudaSuccess;
  return with_float(p.format.code,
                    [&](auto code) { return with_element(p.type, [&](auto element) { return visit(element, code); }); });
}

}  // namespace cuda
}  // namespace jaxlowprec
