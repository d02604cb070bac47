// Launches of kernels whose blocks go through tiles: as many blocks as the device holds at once, or fewer.
#pragma once

#include "intrinsics.cuh"
#include "launch_blocks.h"

namespace jaxlowprec {
namespace cuda {

/// A tile of one of the matrices, or how many of each there are, or how far it is from one tile of a block to its next.
struct TilePlace {
  uint32_t batch, down, across;
};

/// How a launch goes through tiles: block b takes tiles b, b + grid, ... in the order of memory.
struct Tiles {
  TilePlace count, step;

  uint32_t total() const { return count.batch * count.down * count.across; }

  JLP_DEVICE TilePlace place(const Tiles& tiles, uint32_t tile) {
    const uint32_t down = tile / tiles.count.across, batch = down / tiles.count.down;
    return {batch, down - batch * tiles.count.down, tile - down * tiles.count.across};
  }
  /// The block's first tile; its batch is out of range where there is none.
  JLP_DEVICE TilePlace first(const Tiles& tiles) { return place(tiles, blockIdx.x); }
  JLP_DEVICE TilePlace next(const Tiles& tiles, TilePlace at) {
    at.across += tiles.step.across;
    const bool beside = at.across >= tiles.count.across;
    at.across -= beside ? tiles.count.across : 0;
    at.down += tiles.step.down + beside;
    const bool below = at.down >= tiles.count.down;
    at.down -= below ? tiles.count.down : 0;
    at.batch += tiles.step.batch + below;
    return at;
  }
};

/// Tiles of matrices of so many; false if they cannot be numbered in 32 bits, also one grid further.
inline bool cut(int64_t batch, int64_t down, int64_t across, Tiles& tiles) {
  constexpr int64_t kMost = INT32_MAX;
  tiles.count = {static_cast<uint32_t>(batch), static_cast<uint32_t>(down), static_cast<uint32_t>(across)};
  return down <= kMost && across <= kMost && batch <= kMost && down * across <= kMost && down * across * batch <= kMost;
}

/// Launches a kernel with `arguments`, whose `tiles` are counted. `blocks` is how many a multiprocessor is expected to hold.
template <class Shared, class Arguments>
cudaError_t launch_over_tiles(void (*kernel)(Arguments), int threads, int blocks, Arguments arguments, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  Tiles& tiles = arguments.tiles;
  const uint32_t held = static_cast<uint32_t>(multiprocessors * blocks);
  const uint32_t grid = tiles.total() < held ? tiles.total() : held;
  const uint32_t down = grid / tiles.count.across;
  tiles.step = {down / tiles.count.down, down % tiles.count.down, grid % tiles.count.across};
  return launch_blocks(kernel, {grid, 1, 1, threads, sizeof(Shared)}, stream, arguments);
}

}  // namespace cuda
}  // namespace jaxlowprec
