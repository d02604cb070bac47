#include "../launch.h"
#include "../quantize/quantize_launch.cuh"
#include "norm_quantize.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

/// Sets what the norm needs beside the elements, whose rows are whole pieces or not.
template <class Arguments>
void set_operands(const NormQuantizeProblem& p, bool pieces, Arguments& a) {
  a.weight = p.weight, a.beta = p.beta, a.mean = p.mean, a.inverse = p.inverse;
  a.whole = pieces && aligned(p.weight, 16) && aligned(p.beta, 16);
}

template <class E, class Code, bool kStochastic>
cudaError_t launch_tiles_of_norm(const NormQuantizeProblem& p, cudaStream_t stream) {
  QuantizeProblem q = p.quantize;
  q.x = p.total ? p.total : p.x;
  if constexpr (std::is_same_v<E, BF16> && !kStochastic)
    if (const int found = pow2_block<Code>(q.format); found && whole_tiles(q)) {
      NormQuantizeArguments<WholeTilesArguments> a{whole_tiles_arguments(q)};
      set_operands(p, true, a);
      return with_pow2_block<Code>(
          found, [&](auto block) { return launch_pow2_tiles<quantize_norm_pow2_tiles<Code, block>, Code>(q, a, stream); });
    }
  NormQuantizeArguments<QuantizeArguments> a{quantize_arguments<E, Code>(q)};
  set_operands(p, a.pieces, a);
  if (!cut(q.batch, divide_up(q.rows, kTile), divide_up(q.columns, kTile), a.tiles)) return cudaErrorInvalidValue;
  using Shared = TilesShared<E, Code, Scales::kOne, kStochastic>;
  return launch_over_tiles<quantize_norm_tiles<E, Code, kStochastic>, Shared>(kTileThreads, a, stream);
}

}  // namespace

cudaError_t launch(const NormQuantizeProblem& p, cudaStream_t stream) {
  if (!random_fits(p.quantize)) return cudaErrorInvalidValue;
  const cudaError_t error = launch(static_cast<const NormProblem&>(p), stream);
  if (error != cudaSuccess || p.batch == 0 || p.rows == 0 || p.columns == 0) return error;
  return with_float(p.quantize.format.code, [&](auto code) {
    return with_element(p.type, [&](auto element) {
      using Code = decltype(code);
      using E = decltype(element);
      return p.quantize.stochastic() ? launch_tiles_of_norm<E, Code, true>(p, stream)
                                     : launch_tiles_of_norm<E, Code, false>(p, stream);
    });
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
