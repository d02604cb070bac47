// Launches over tiles: that blocks have equally many, that each is visited once in either order, and what the driver is
// asked.
#include "../../xla_ffi/cuda/launch_grid.cuh"

#include "../cpp/check.h"

namespace jaxlowprec {
namespace cuda {
namespace {

using cuda_on_cpu::Array;
using cuda_on_cpu::device;

constexpr int kMultiprocessors[] = {1, 8, 84, 108, 114, 132, 148};
constexpr int kResident[] = {1, 2, 3, 4, 5, 8};
constexpr uint32_t kTiles[] = {1, 2, 131, 132, 133, 527, 528, 529, 660, 661, 4096, 4097, 16384, 1000003, INT32_MAX};

uint32_t rounds_of(uint32_t tiles, uint32_t grid) { return (tiles - 1) / grid + 1; }

TEST(no_block_has_more_than_one_tile_more_than_another_and_few_have_one_fewer) {
  for (const uint32_t multiprocessors : kMultiprocessors)
    for (const uint32_t resident : kResident)
      for (const uint32_t tiles : kTiles) {
        const uint32_t grid = even_grid(tiles, multiprocessors, resident), rounds = rounds_of(tiles, grid);
        CHECK(grid >= 1);
        CHECK(grid <= tiles);
        CHECK(grid <= multiprocessors * resident);
        CHECK(uint64_t{grid} * rounds - tiles < rounds);  // a block fewer would need another round
      }
}

TEST(multiprocessors_are_full_where_there_are_tiles_for_all) {
  CHECK_EQ(even_grid(100, 132, 4), 100u);   // fewer tiles than places: a block each
  CHECK_EQ(even_grid(4096, 132, 4), 512u);  // 8 tiles each instead of 8 or 7
  CHECK_EQ(even_grid(4096, 108, 3), 316u);  // an A100's three of four: 13 each
  CHECK_EQ(even_grid(4096, 132, 5), 512u);  // 586 blocks would give some multiprocessors 35 tiles, others 28
  CHECK_EQ(even_grid(1056, 132, 4), 528u);  // all places, twice
  CHECK_EQ(even_grid(INT32_MAX, 132, 4), 528u);
}

// --- the tiles of each block

/// Per tile: the block that took it and how many it took before, and how often anyone did.
struct Visits {
  uint32_t *block, *turn, *count;
};
struct WalkArguments {
  Tiles tiles;
  Visits visits;
};
struct WalkShared {
  uint32_t nothing;
};

template <bool kBackwards>
void walk(const WalkArguments a) {
  uint32_t turn = 0;
  TilePlace at = kBackwards ? Tiles::last(a.tiles) : Tiles::first(a.tiles);
  while (at.batch < a.tiles.count.batch) {
    const uint32_t tile = (at.batch * a.tiles.count.down + at.down) * a.tiles.count.across + at.across;
    if (threadIdx.x == 0) a.visits.block[tile] = blockIdx.x, a.visits.turn[tile] = turn, a.visits.count[tile] = 1;
    ++turn;
    at = kBackwards ? Tiles::previous(a.tiles, at) : Tiles::next(a.tiles, at);
  }
}

/// The current device: another index, so that what is known of an earlier one does not count.
void choose_device(int multiprocessors, int resident) {
  static int index = 0;
  device().multiprocessors = multiprocessors, device().resident_blocks = resident, device().index = ++index;
}

template <bool kBackwards>
void check_walk(int64_t batch, int64_t down, int64_t across) {
  WalkArguments a = {};
  CHECK(cut(batch, down, across, a.tiles));
  const uint32_t tiles = a.tiles.total();
  const uint32_t grid = even_grid(tiles, device().multiprocessors, device().resident_blocks);
  Array<uint32_t> block(tiles, "block"), turn(tiles, "turn"), count(tiles, "count");  // two blocks in one are reported
  a.visits = {block.data(), turn.data(), count.data()};
  CHECK_EQ((launch_over_tiles<walk<kBackwards>, WalkShared>(32, a, nullptr)), cudaSuccess);
  CHECK_EQ(block.unwritten() + turn.unwritten() + count.unwritten(), 0u);
  CHECK_EQ(count.traffic().written, 4 * tiles);  // no tile was visited twice
  for (uint32_t i = 0; i < tiles; ++i) {
    const uint32_t tile = kBackwards ? tiles - 1 - i : i;
    CHECK_EQ(block[tile], i % grid);
    CHECK_EQ(turn[tile], i / grid);
  }
}

TEST(every_tile_is_visited_once_in_either_order) {
  const cuda_on_cpu::Device before = device();
  for (const auto& [multiprocessors, resident] : {std::pair{1, 1}, {1, 3}, {2, 4}, {7, 1}, {3, 5}, {132, 4}}) {
    choose_device(multiprocessors, resident);
    for (const auto& count : {TilePlace{1, 1, 1}, {1, 1, 40}, {40, 1, 1}, {1, 40, 1}, {3, 5, 7}, {2, 16, 3}, {11, 2, 9}}) {
      check_walk<false>(count.batch, count.down, count.across);
      check_walk<true>(count.batch, count.down, count.across);
    }
  }
  device() = before;
}

// --- queries of the driver

template <int kNumber>
void asks(const WalkArguments) {}
struct LargeShared {
  uint8_t bytes[60 << 10];
};

template <int kNumber, class Shared = WalkShared>
cudaError_t launch_asking() {
  WalkArguments a = {};
  cut(1, 1, 1000, a.tiles);
  return launch_over_tiles<asks<kNumber>, Shared>(256, a, nullptr);
}

TEST(the_driver_is_asked_once_for_each_kernel_and_device) {
  const cuda_on_cpu::Device before = device();
  const int queries = cuda_on_cpu::occupancy_queries();
  choose_device(132, 4);
  for (int i = 0; i < 3; ++i) CHECK_EQ(launch_asking<0>(), cudaSuccess);
  CHECK_EQ(cuda_on_cpu::occupancy_queries(), queries + 1);
  for (int i = 0; i < 3; ++i) CHECK_EQ(launch_asking<1>(), cudaSuccess);  // another kernel
  CHECK_EQ(cuda_on_cpu::occupancy_queries(), queries + 2);
  const int first = device().index;
  choose_device(108, 3);  // another device
  for (int i = 0; i < 3; ++i) CHECK_EQ(launch_asking<0>(), cudaSuccess);
  CHECK_EQ(cuda_on_cpu::occupancy_queries(), queries + 3);
  device().index = first;  // known still
  CHECK_EQ(launch_asking<0>(), cudaSuccess);
  CHECK_EQ(cuda_on_cpu::occupancy_queries(), queries + 3);
  device() = before;
}

TEST(more_than_48_kib_are_allowed_before_the_driver_is_asked) {
  const cuda_on_cpu::Device before = device();
  choose_device(2, 0);
  CHECK_EQ((launch_asking<2, LargeShared>()), cudaSuccess);
  int blocks = 0;
  CHECK_EQ((resident_blocks<asks<2>, LargeShared>(device().index, 256, blocks)), cudaSuccess);
  CHECK_EQ(blocks, 3);  // 61 KiB each, of 228
  device() = before;
}

TEST(shared_memory_is_allowed_once_for_each_kernel_and_device) {
  const cuda_on_cpu::Device before = device();
  choose_device(2, 0);
  const int settings = cuda_on_cpu::attribute_settings();
  WalkArguments a = {};
  cut(1, 1, 1, a.tiles);
  a.tiles.step = {1, 0, 0};
  const auto launch = [&](size_t bytes) { return launch_blocks(asks<4>, {1, 1, 1, 256, bytes}, nullptr, a); };
  for (const size_t bytes : {size_t{48} << 10, size_t{60} << 10, size_t{50} << 10, size_t{60} << 10})
    CHECK_EQ(launch(bytes), cudaSuccess);
  CHECK_EQ(cuda_on_cpu::attribute_settings(), settings + 1);
  CHECK_EQ(launch(size_t{64} << 10), cudaSuccess);  // more
  choose_device(2, 0);                              // another device
  CHECK_EQ(launch(size_t{60} << 10), cudaSuccess);
  CHECK_EQ(cuda_on_cpu::attribute_settings(), settings + 3);
  device() = before;
}

TEST(devices_beyond_those_remembered_are_asked_every_time) {
  const cuda_on_cpu::Device before = device();
  choose_device(132, 4);
  device().index = 1000;
  const int queries = cuda_on_cpu::occupancy_queries();
  for (int i = 0; i < 3; ++i) CHECK_EQ(launch_asking<3>(), cudaSuccess);
  CHECK_EQ(cuda_on_cpu::occupancy_queries(), queries + 3);
  device() = before;
}

}  // namespace
}  // namespace cuda
}  // namespace jaxlowprec
