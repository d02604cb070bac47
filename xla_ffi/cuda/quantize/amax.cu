#include "../launch.h"
#include "amax.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

template <class E>
cudaError_t launch_amax(const AmaxProblem& p, cudaStream_t stream) {
  const int64_t matrix = p.rows * p.columns, tile = kAmaxThreads * kAmaxPieces * (16 / E::kBytes);
  const int64_t down = p.rotated ? divide_up(p.rows, kRotatedRows) : 1;
  const int64_t across = p.rotated ? divide_up(p.columns, kTile) : divide_up(matrix, tile);
  AmaxArguments a = {};
  if (!cut(p.batch, down, across, a.tiles)) return cudaErrorInvalidValue;
  a.x = p.x, a.rows = p.rows, a.columns = p.columns;
  a.plain = p.plain, a.rotated = p.rotated, a.sign_mask = p.sign_mask;
  a.pairs = aligned(p.x, 2 * E::kBytes) && p.columns % 2 == 0;
  if (p.rotated) return launch_over_tiles<amax_rotated<E>, AmaxShared>(kAmaxThreads, a, stream);
  a.columns = matrix;
  return launch_over_tiles<amax_plain<E>, AmaxShared>(kAmaxThreads, a, stream);
}

}  // namespace

cudaError_t launch(const AmaxProblem& p, cudaStream_t stream) {
  for (uint32_t* result : {p.plain, p.rotated}) {
    if (!result) continue;
    const cudaError_t error = cudaMemsetAsync(result, 0, p.batch * sizeof *result, stream);
    if (error != cudaSuccess) return error;
  }
  if (p.batch == 0 || p.rows == 0 || p.columns == 0 || (!p.plain && !p.rotated)) return cudaSuccess;
  return with_element(p.type, [&](auto element) { return launch_amax<decltype(element)>(p, stream); });
}

}  // namespace cuda
}  // namespace jaxlowprec
