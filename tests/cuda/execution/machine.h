// The machine's state while it executes a block: its threads are fibers of one thread of the CPU, and switch where they
// wait. Included by the machine only: kernels see threadIdx as a constant.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives.h"
#include "vector_types.h"

namespace cuda_on_cpu {

constexpr uint32_t kWarpSize = 32, kMaxWarps = 32, kMaxThreads = kWarpSize * kMaxWarps;

/// Counts the synchronisations since the program started; never restarts, so records of accesses need no clearing.
using Stamp = uint32_t;

struct AsyncCopy {
  void* to;
  const void* from;
  uint32_t bytes, group;
  uint32_t place;  // where it was started: see report.h
};

struct Warp;

struct Thread {
  void* stack_pointer;
  char* stack;  // its lowest byte
  Warp* warp;
  uint32_t index, lane;
  uint3 position;
  Site site;                // where it waits
  uint32_t mask, gathered;  // lanes it waits for, and those that waited for the same when it came
  void* argument;
  std::vector<AsyncCopy> copies;  // that have not landed
  uint32_t copy_groups;           // committed
};

struct Warp {
  Thread* threads;  // its first
  uint32_t index;
  uint32_t present;  // lanes that exist and have not returned, as bits
  uint32_t runnable;
  uint32_t waiting;  // in a collective
  Thread* latest;    // to begin to wait
  Stamp start;       // after the latest __syncthreads or __syncwarp of all lanes
  /// After __syncwarp of some lanes: what lane j did before ordered[i][j] is before what lane i does now.
  Stamp ordered[kWarpSize][kWarpSize];
};

struct Block {
  dim3 size;
  uint32_t threads, present;
  uint32_t arrived, predicates;  // at the barrier
  int barrier_result;
  Thread* first_arrived;
  uint32_t runnable_warps;
  Stamp first, start;  // first of the block; after the latest __syncthreads
};

struct StartedBlock {
  Stamp first;
  uint3 index;
};

struct Machine {
  Stamp clock = 1;
  Stamp launch_start = 0;
  const void* kernel = nullptr;
  std::vector<StartedBlock> blocks;  // of the launch
  Block block;
  Warp warps[kMaxWarps];
  Thread threads[kMaxThreads];
  Thread* current = nullptr;  // null: no kernel runs
  const void* parameters = nullptr;
  size_t parameter_bytes = 0;
  void* host_stack_pointer = nullptr;
};
extern Machine machine;

constexpr size_t kStackBytes = 128 << 10;

inline void make_runnable(Warp& warp, uint32_t lanes) {
  warp.runnable |= lanes;
  machine.block.runnable_warps |= 1u << warp.index;
}
/// Lets others run until somebody makes the current thread runnable.
void wait();

/// Gives up the launch: the threads are abandoned where they are.
[[noreturn]] void abandon_launch();

/// Waits that will never end, described. Called when no thread can go on.
std::string deadlock();

uint3 current_block_index();

}  // namespace cuda_on_cpu
