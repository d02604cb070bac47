// From the operands of an activation, or of its gradients, to a launch of one of the kernels of activation_quantize.cuh.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "../quantize/quantize_launch.cuh"
#include "activation_quantize.cuh"

namespace jaxlowprec {
namespace cuda {

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
