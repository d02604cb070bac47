// Launches of kernels whose blocks go through tiles: about as many blocks as the device holds at once, each with as many
// tiles as the others.
#pragma once

#include <atomic>

#include "intrinsics.cuh"
#include "launch_blocks.h"

namespace jaxlowprec {
namespace cuda {

/// A tile of one of the matrices, or how many of each there are, or how far it is from one tile of a block to its next.
struct TilePlace {
  uint32_t batch, down, across;
};

/// How a launch goes through tiles: block b takes tiles b, b + grid, ... in the order of memory, or in the opposite order.
struct Tiles {
  TilePlace count, step;

  uint32_t total() const { return count.batch * count.down * count.across; }

  JLP_DEVICE TilePlace place(const Tiles& tiles, uint32_t tile) {
    const uint32_t down = tile / tiles.count.across, batch = down / tiles.count.down;
    return {batch, down - batch * tiles.count.down, tile - down * tiles.count.across};
  }
  /// The block's first tile in the order of memory; a place's batch is out of range where there is no tile.
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
  /// The block's first tile from the end of memory. A pass that follows another over the same elements begins with those
  /// that the other read last, which the L2 cache still holds.
  JLP_DEVICE TilePlace last(const Tiles& tiles) {
    return place(tiles, tiles.count.batch * tiles.count.down * tiles.count.across - 1 - blockIdx.x);
  }
  JLP_DEVICE TilePlace previous(const Tiles& tiles, TilePlace at) {
    const bool beside = at.across < tiles.step.across;
    at.across += (beside ? tiles.count.across : 0) - tiles.step.across;
    const uint32_t down = tiles.step.down + beside;
    const bool above = at.down < down;
    at.down += (above ? tiles.count.down : 0) - down;
    at.batch -= tiles.step.batch + above;  // before the first, it wraps to a number beyond the last
    return at;
  }
};

/// Tiles of matrices of so many; false if they cannot be numbered in 32 bits, also one grid further.
inline bool cut(int64_t batch, int64_t down, int64_t across, Tiles& tiles) {
  constexpr int64_t kMost = INT32_MAX;
  tiles.count = {static_cast<uint32_t>(batch), static_cast<uint32_t>(down), static_cast<uint32_t>(across)};
  return down <= kMost && across <= kMost && batch <= kMost && down * across <= kMost && down * across * batch <= kMost;
}

/// As many blocks as a device holds at once, or fewer, so that no block has more than one tile more than another.
inline uint32_t even_grid(uint32_t tiles, uint32_t held) {
  const auto up = [](uint32_t a, uint32_t b) { return a / b + (a % b != 0); };
  return up(tiles, up(tiles, held));
}

/// The grid for a device whose multiprocessors hold `resident` blocks each. An even grid may leave some multiprocessors a
/// block more than others; one block less on each is taken where that is better and little occupancy.
inline uint32_t even_grid(uint32_t tiles, uint32_t multiprocessors, uint32_t resident) {
  const auto busiest = [&](uint32_t grid) {  // tiles of the multiprocessor that has most
    return ((grid - 1) / multiprocessors + 1) * static_cast<uint64_t>((tiles - 1) / grid + 1);
  };
  const uint32_t all = even_grid(tiles, multiprocessors * resident);
  if (resident < 4) return all;
  const uint32_t fewer = even_grid(tiles, multiprocessors * (resident - 1));
  return busiest(fewer) < busiest(all) ? fewer : all;
}

/// Lets a kernel have its shared memory, and says how many of its blocks a multiprocessor of a device then holds at once.
/// The driver is told and asked once for each kernel and device, by whichever thread comes first, or by several at once: the
/// answer is the same. Neither is work on a stream, so both may happen while one is captured.
template <auto kKernel, class Shared>
cudaError_t resident_blocks(int device, int threads, int& blocks) {
  constexpr int kDevices = 64;  // for others, every time
  static std::atomic<int> answers[kDevices];
  if (device < kDevices) blocks = answers[device].load(std::memory_order_acquire);
  if (device < kDevices && blocks > 0) return cudaSuccess;
  cudaError_t error = allow_shared(reinterpret_cast<const void*>(kKernel),
                                   sizeof(Shared));  // first: a kernel that is not allowed it does not fit
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, sizeof(Shared));
  if (error != cudaSuccess) return error;
  if (blocks < 1) return cudaErrorLaunchOutOfResources;
  if (device < kDevices) answers[device].store(blocks, std::memory_order_release);
  return cudaSuccess;
}

/// The grid of a kernel whose blocks share so many tiles, on the current device.
template <auto kKernel, class Shared>
cudaError_t grid_over(uint32_t tiles, int threads, uint32_t& grid) {
  int device = 0, multiprocessors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = resident_blocks<kKernel, Shared>(device, threads, resident);
  if (error == cudaSuccess) grid = even_grid(tiles, static_cast<uint32_t>(multiprocessors), static_cast<uint32_t>(resident));
  return error;
}

/// Launches a kernel without shared memory of its own whose block b takes pieces b, b + grid, ... of so many.
template <auto kKernel, class Arguments>
cudaError_t launch_over_pieces(int64_t pieces, int threads, const Arguments& arguments, cudaStream_t stream) {
  struct Nothing {};
  uint32_t grid = 0;
  if (pieces > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = grid_over<kKernel, Nothing>(static_cast<uint32_t>(pieces), threads, grid);
  return error == cudaSuccess ? launch_allowed(kKernel, {grid, 1, 1, threads}, stream, arguments) : error;
}

/// Launches a kernel with `arguments`, whose `tiles` are counted.
template <auto kKernel, class Shared, class Arguments>
cudaError_t launch_over_tiles(int threads, Arguments arguments, cudaStream_t stream) {
  Tiles& tiles = arguments.tiles;
  uint32_t grid = 0;
  const cudaError_t error = grid_over<kKernel, Shared>(tiles.total(), threads, grid);
  if (error != cudaSuccess) return error;
  const uint32_t down = grid / tiles.count.across;
  tiles.step = {down / tiles.count.down, down % tiles.count.down, grid % tiles.count.across};
  return launch_allowed(kKernel, {grid, 1, 1, threads, sizeof(Shared)}, stream, arguments);
}

}  // namespace cuda
}  // namespace jaxlowprec
