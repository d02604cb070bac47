#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "host_api.h"
#include "report.h"
#include "rounding.h"
#include "shadow.h"
#include "testing.h"

// Constants to the kernels: cuda_runtime.h.
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Saves what a called function must keep, stores the stack's pointer where the first argument says and goes on where the
// stack of the second was left. 15 ns there and back; swapcontext makes a system call.
extern "C" void cuda_on_cpu_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
constexpr size_t kSavedWords = 8, kReturnWord = 6;  // the saved registers, the address, and room for its own caller's
#else
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, %function
cuda_on_cpu_switch:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
constexpr size_t kSavedWords = 20, kReturnWord = 1;
#endif

namespace cuda_on_cpu {

Machine machine;

namespace {

const Launch* running;
uint64_t random_state;

uint32_t random_below(uint32_t n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return static_cast<uint32_t>((random_state >> 32) * n >> 32);
}

/// One of the bits of `set`, which is not empty.
uint32_t choose(uint32_t set) {
  switch (options().order) {
    case Order::kForward: return __builtin_ctz(set);
    case Order::kReverse: return 31 - __builtin_clz(set);
    default:
      for (uint32_t skip = random_below(__builtin_popcount(set)); skip; --skip) set &= set - 1;
      return __builtin_ctz(set);
  }
}

/// The thread to go on, no longer runnable; null where there is none. A warp goes on while it can, but in random order.
Thread* next_thread() {
  Block& block = machine.block;
  if (!block.runnable_warps) return nullptr;
  uint32_t w = machine.current ? machine.current->warp->index : choose(block.runnable_warps);
  if (options().order == Order::kRandom || !(block.runnable_warps & 1u << w)) w = choose(block.runnable_warps);
  Warp& warp = machine.warps[w];
  const uint32_t lane = choose(warp.runnable);
  warp.runnable &= ~(1u << lane);
  if (!warp.runnable) block.runnable_warps &= ~(1u << w);
  return warp.threads + lane;
}

void go_on_with(Thread& next, void** from) {
  machine.current = &next;
  threadIdx = next.position;
  cuda_on_cpu_switch(from, next.stack_pointer);
}

void switch_to_host(void** from) {
  machine.current = nullptr;
  cuda_on_cpu_switch(from, machine.host_stack_pointer);
}

/// The current thread has returned.
[[noreturn]] void leave() {
  Thread& self = *machine.current;
  Block& block = machine.block;
  if (!self.copies.empty())
    fail("returns before the copy_async at " + placeholder(self.copies.front().place) + " was waited for");
  if (block.arrived)
    fail("returns, but " + text_of(*block.first_arrived) + " waits in " + text_of(block.first_arrived->site));
  for (uint32_t lanes = self.warp->waiting; lanes; lanes &= lanes - 1) {
    const Thread& other = self.warp->threads[__builtin_ctz(lanes)];
    if (other.mask & 1u << self.lane) fail("returns, but " + text_of(other) + " waits for it in " + text_of(other.site));
  }
  self.warp->present &= ~(1u << self.lane);
  --block.present;
  if (Thread* next = next_thread()) go_on_with(*next, &self.stack_pointer);
  if (block.present) fail("returns, and nobody can go on:" + deadlock());
  switch_to_host(&self.stack_pointer);
  __builtin_unreachable();
}

void thread_main() {
  running->call(running->parameters);
  leave();
}

/// A stack for each thread, with an unmapped page below.
char* make_stacks() {
  constexpr size_t kGuard = 4096;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) std::perror("stacks"), std::exit(1);
  char* const stacks = static_cast<char*>(memory);
  for (size_t i = 0; i < kMaxThreads; ++i) mprotect(stacks + i * kStackBytes, kGuard, PROT_NONE);
  return stacks;
}

void prepare_thread(Thread& thread) {
  void** const top = reinterpret_cast<void**>(thread.stack + kStackBytes) - kSavedWords;
  std::fill(top, top + kSavedWords, nullptr);
  top[kReturnWord] = reinterpret_cast<void*>(thread_main);
  thread.stack_pointer = top;
  thread.site = {};
  thread.copies.clear();
  thread.copy_groups = 0;
}

void prepare_threads(const dim3& size) {
  static char* const stacks = make_stacks();
  for (uint32_t i = 0; i < machine.block.threads; ++i) {
    Thread& thread = machine.threads[i];
    thread.stack = stacks + i * kStackBytes;
    thread.index = i, thread.lane = i % kWarpSize, thread.warp = machine.warps + i / kWarpSize;
    thread.position = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
  }
}

void prepare_warps() {
  Block& block = machine.block;
  for (uint32_t w = 0; w * kWarpSize < block.threads; ++w) {
    Warp& warp = machine.warps[w];
    const uint32_t lanes = std::min(kWarpSize, block.threads - w * kWarpSize);
    warp.threads = machine.threads + w * kWarpSize;
    warp.index = w;
    warp.present = warp.runnable = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    warp.waiting = 0;
    warp.latest = nullptr;
    warp.start = block.first;
    block.runnable_warps |= 1u << w;
  }
}

/// Whether it ended by itself.
bool run_block(const uint3& index) {
  Block& block = machine.block;
  blockIdx = index;
  block.first = block.start = ++machine.clock;
  block.present = block.threads;
  block.arrived = block.predicates = block.runnable_warps = 0;
  machine.blocks.push_back({block.first, index});
  for (uint32_t i = 0; i < block.threads; ++i) prepare_thread(machine.threads[i]);
  prepare_warps();
  go_on_with(*next_thread(), &machine.host_stack_pointer);
  return !deliver_failure();
}

bool run_blocks(const dim3& grid) {
  if (!options().only_blocks.empty()) {
    for (const dim3& index : options().only_blocks)
      if (!run_block({index.x, index.y, index.z})) return false;
    return true;
  }
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        if (!run_block({x, y, z})) return false;
  return true;
}

}  // namespace

Options& options() {
  static Options options;
  return options;
}

void wait() {
  Thread& self = *machine.current;
  Thread* const next = next_thread();
  if (!next) fail("waits, and nobody can go on:" + deadlock());
  if (next == &self) return;
  go_on_with(*next, &self.stack_pointer);
}

void abandon_launch() {
  switch_to_host(&machine.current->stack_pointer);
  __builtin_unreachable();
}

std::string deadlock() {
  std::string text;
  int listed = 0;
  for (uint32_t i = 0; i < machine.block.threads && listed < 4; ++i) {
    const Thread& thread = machine.threads[i];
    if (!thread.site.operation) continue;
    const bool alike = i && machine.threads[i - 1].site.operation == thread.site.operation &&
                       machine.threads[i - 1].site.line == thread.site.line;
    if (!alike) text += "\n  " + text_of(thread) + " waits in " + text_of(thread.site), ++listed;
  }
  return text;
}

uint3 current_block_index() { return blockIdx; }

bool execute(const cudaLaunchConfig_t& config, const Launch& launch) {
  running = &launch;
  machine.kernel = launch.kernel;
  machine.parameters = launch.parameters, machine.parameter_bytes = launch.parameter_bytes;
  machine.launch_start = ++machine.clock;
  machine.blocks.clear();
  random_state = options().seed * 0x9E3779B97F4A7C15u + 1;
  blockDim = config.blockDim, gridDim = config.gridDim;
  machine.block.threads = config.blockDim.x * config.blockDim.y * config.blockDim.z;
  prepare_threads(config.blockDim);
  set_shared_memory(config.dynamicSmemBytes);
  const FloatMode mode = flushing_to_zero();
  const bool ended = run_blocks(config.gridDim);
  set_float_mode(mode);
  ++machine.clock;
  return ended;
}

}  // namespace cuda_on_cpu
