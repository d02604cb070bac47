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
};

template <auto kKernel, class E, class Code, bool kStochastic, int kTiles>
cudaError_t launch_made(const MadeOf<kTiles>& made, cudaStream_t stream) {
  using Shared = TilesShared<E, Code, Scales::kOne, kStochastic, kTiles>;
  static_assert(sizeof(Shared) <= 99 * 1024, "what a block can have on sm_86, sm_89 and sm_120");
  ActivationQuantizeArguments<kTiles> a{};
  a.kind = made.kind, a.makes = made.makes;
  for (int i = 0; i < kTiles; ++i) {
    QuantizeProblem q = made.results[i];
    q.x = made.operands[i];
    a.results[i] = quantize_arguments<E, Code>(q);
  }
  std::copy_n(made.operands + kTiles, 2, a.others);
  a.whole = a.results[0].pieces && aligned(a.others[0], 16) && aligned(a.others[1], 16);
  const QuantizeArguments& q = a.results[0];
  if (!cut(made.results->batch, divide_up(q.rows, kTile), divide_up(q.columns, kTile), a.tiles))
    return cudaErrorInvalidValue;
  return launch_over_tiles<kKernel, Shared>(kTileThreads, a, stream);
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
