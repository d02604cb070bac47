// Sums over rows in the order of numerics.md 12.3: of parts of 64 rows, and of these parts.
//
// Data flow: a thread takes 16 rows of a pair of columns -> float32 -> their sum; the sums of a tile's four sixteens meet in
// shared memory, and are written, for each column. Then 8 threads of a column add every 8th part, and one their sums.
//
// Bytes moved per element: what it has, and 1/8 for the sums of parts.
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles of 64 rows by 128 columns; a
// block for 32 columns' parts.
#include "../launch.h"
#include "../launch_blocks.h"
#include "pairs.cuh"

namespace jaxlowprec {
namespace cuda {

struct SumOverRowsArguments : AmaxArguments {
  float* sums;  // [batch, tiles down, columns]
};

template <ElementType kType>
static __global__ void __launch_bounds__(kAmaxThreads, kRotatedBlocks<ElementOf<kType>>)
    sum_over_rows_kernel(const __grid_constant__ SumOverRowsArguments a) {
  using E = ElementOf<kType>;
  TileSums& shared = block_shared<TileSums>();
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = Tiles::next(a.tiles, at)) {
    const int64_t row = static_cast<int64_t>(at.down) * kRotatedRows + threadIdx.x / kTilePairs * 16;
    const int64_t column = static_cast<int64_t>(at.across) * kTile + threadIdx.x % kTilePairs * 2;
    const auto* x = static_cast<const typename E::Storage*>(a.x) + at.batch * a.rows * a.columns;
    uint32_t pairs[Tile<E>::kPairWords];
    load_pair<E>(a, x, row, column, pairs);
    const int64_t part = static_cast<int64_t>(at.batch) * a.tiles.count.down + at.down;
    const int columns = static_cast<int>(max(int64_t{0}, min(int64_t{2}, a.columns - column)));
    write_tile_sums(sum_of_pairs<kType>(pairs), a.sums + part * a.columns + column, columns, shared);
  }
}

constexpr int kAddedTogether = 32;  // columns that a block adds up over the parts

struct AddPartsShared {
  float sums[kAddedApart][kAddedTogether];
};

static __global__ void __launch_bounds__(kAddedTogether* kAddedApart)
    add_parts_kernel(const __grid_constant__ AddPartsProblem a, uint32_t across) {
  auto& shared = block_shared<AddPartsShared>();
  const int64_t batch = blockIdx.x / across;
  const int place = threadIdx.x % kAddedTogether, sequence = threadIdx.x / kAddedTogether;
  const int64_t column = static_cast<int64_t>(blockIdx.x % across) * kAddedTogether + place;
  const bool exists = column < a.columns;
  const float* const found = a.found + batch * a.parts * a.step + column;
  float sum = 0;
#pragma unroll 8
  for (int64_t part = sequence; part < a.parts; part += kAddedApart) sum += exists ? found[part * a.step] : 0.0f;
  shared.sums[sequence][place] = sum;
  __syncthreads();
  if (sequence > 0 || !exists) return;
  for (int i = 1; i < kAddedApart; ++i) sum += shared.sums[i][place];
  a.result[batch * a.columns + column] = sum;
}

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
