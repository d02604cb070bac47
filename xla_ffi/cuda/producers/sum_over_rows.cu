#include "../launch.h"
#include "../launch_blocks.h"
#include "sum_over_rows.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

template <ElementType kType>
cudaError_t launch_sums(const SumOverRowsProblem& p, cudaStream_t stream) {
  SumOverRowsArguments a{};
  if (!cut(p.batch, p.parts(), divide_up(p.columns, kTile), a.tiles)) return cudaErrorInvalidValue;
  a.x = p.x, a.rows = p.rows, a.columns = p.columns, a.sums = p.sums;
  a.pairs = aligned(p.x, 2 * kElementBytes<kType>) && p.columns % 2 == 0;
  return launch_over_tiles<sum_over_rows_kernel<kType>, TileSums>(kAmaxThreads, a, stream);
}

}  // namespace

cudaError_t launch(const SumOverRowsProblem& p, cudaStream_t stream) {
  if (p.batch * p.rows * p.columns == 0) return cudaSuccess;
  return with_type(p.type, [&](auto type) { return launch_sums<type>(p, stream); });
}

cudaError_t launch(const AddPartsProblem& p, cudaStream_t stream) {
  const int64_t across = divide_up(p.columns, kAddedTogether);
  if (p.batch == 0 || across == 0) return cudaSuccess;
  if (across > INT32_MAX) return cudaErrorInvalidValue;
  const Blocks blocks{p.batch * across, 1, 1, kAddedTogether * kAddedApart, sizeof(AddPartsShared)};
  return launch_blocks(add_parts_kernel, blocks, stream, p, static_cast<uint32_t>(across));
}

}  // namespace cuda
}  // namespace jaxlowprec
