#include "collectives.h"

#include <algorithm>
#include <cstdio>

#include "machine.h"
#include "report.h"
#include "shadow.h"

namespace cuda_on_cpu {
namespace {

bool same(const Site& a, const Site& b) {
  const auto equal = [](const char* x, const char* y) { return x == y || !std::strcmp(x, y); };
  return a.line == b.line && equal(a.operation, b.operation) && equal(a.file, b.file);
}

std::string in_hexadecimal(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "%#010x", mask);
  return text;
}

void check_mask(const Thread& self, const Site& site, uint32_t mask) {
  const Warp& warp = *self.warp;
  if (!(mask & 1u << self.lane)) fail("is not in its own mask " + in_hexadecimal(mask) + " of " + text_of(site));
  if (const uint32_t absent = mask & ~warp.present) {
    const uint32_t lane = __builtin_ctz(absent);
    const bool exists = warp.index * kWarpSize + lane < machine.block.threads;
    fail("waits in " + text_of(site) + " with mask " + in_hexadecimal(mask) + ", but lane " + std::to_string(lane) +
         (exists ? " has returned" : " does not exist"));
  }
}

/// The lanes that wait for the same as `self`, with it. Others may wait for something else that they can have without it.
uint32_t gathered(const Thread& self) {
  const Warp& warp = *self.warp;
  const uint32_t own = 1u << self.lane;
  const auto alike = [&](const Thread& other) { return other.mask == self.mask && same(other.site, self.site); };
  if (warp.latest && warp.waiting & 1u << warp.latest->lane && alike(*warp.latest)) return warp.latest->gathered | own;
  uint32_t lanes = own;
  for (uint32_t others = warp.waiting & self.mask & ~own; others; others &= others - 1) {
    const Thread& other = warp.threads[__builtin_ctz(others)];
    if (alike(other))
      lanes |= 1u << other.lane;
    else if (other.mask & own)
      fail("is at " + text_of(self.site) + " with mask " + in_hexadecimal(self.mask) + ", but " + text_of(other) +
           " waits for it in " + text_of(other.site) + " with mask " + in_hexadecimal(other.mask));
  }
  return lanes;
}

/// Orders all earlier accesses of the lanes of `mask`, and all that those were ordered after, before their later accesses.
void order_lanes(Warp& warp, uint32_t mask) {
  const Stamp now = ++machine.clock;
  if (mask == warp.present) {
    warp.start = now;
    return;
  }
  Stamp known[kWarpSize] = {};
  for (uint32_t i = mask; i; i &= i - 1)
    for (uint32_t j = 0; j < kWarpSize; ++j) known[j] = std::max(known[j], warp.ordered[__builtin_ctz(i)][j]);
  for (uint32_t j = mask; j; j &= j - 1) known[__builtin_ctz(j)] = now;
  for (uint32_t i = mask; i; i &= i - 1) std::copy(known, known + kWarpSize, warp.ordered[__builtin_ctz(i)]);
}

}  // namespace

uint32_t lane() { return machine.current->lane; }

int block_barrier(const Site& site, bool predicate) {
  Thread& self = *machine.current;
  Block& block = machine.block;
  if (block.present < block.threads) fail("is at " + text_of(site) + ", but threads of the block have returned");
  if (!block.arrived)
    block.first_arrived = &self;
  else if (!same(block.first_arrived->site, site))
    fail("is at " + text_of(site) + ", but " + text_of(*block.first_arrived) + " waits in " +
         text_of(block.first_arrived->site));
  self.site = site;
  block.predicates += predicate;
  if (++block.arrived < block.threads) {
    wait();
    return block.barrier_result;
  }
  block.barrier_result = static_cast<int>(block.predicates);
  block.arrived = block.predicates = 0;
  block.start = ++machine.clock;
  for (uint32_t w = 0; w * kWarpSize < block.threads; ++w) {
    Warp& warp = machine.warps[w];
    warp.start = block.start;
    for (uint32_t lanes = warp.present; lanes; lanes &= lanes - 1) warp.threads[__builtin_ctz(lanes)].site = {};
    make_runnable(warp, warp.present);
  }
  self.warp->runnable &= ~(1u << self.lane);  // it runs
  if (!self.warp->runnable) block.runnable_warps &= ~(1u << self.warp->index);
  return block.barrier_result;
}

void warp_collective(const Site& site, uint32_t mask, void* argument, Combine combine, bool orders) {
  Thread& self = *machine.current;
  Warp& warp = *self.warp;
  check_mask(self, site, mask);
  self.site = site, self.mask = mask, self.argument = argument;
  self.gathered = gathered(self);
  warp.waiting |= 1u << self.lane;
  warp.latest = &self;
  if (self.gathered != mask) {
    wait();
    return;
  }
  void* arguments[kWarpSize] = {};
  for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
    Thread& thread = warp.threads[__builtin_ctz(lanes)];
    arguments[thread.lane] = thread.argument;
    thread.site = {};
  }
  if (combine) combine(arguments);
  if (orders) order_lanes(warp, mask);
  warp.waiting &= ~mask;
  if (const uint32_t others = mask & ~(1u << self.lane)) make_runnable(warp, others);
}

// --- shuffles, votes and reductions

namespace {

struct Shuffle {
  uint64_t value, result;
  uint32_t source;
};

struct Vote {
  bool predicate;
  uint32_t result;
};

struct Reduced {
  uint32_t value, result;
  Reduction reduction;
};

template <class Argument, class F>
void for_lanes(void* const* arguments, F f) {
  for (uint32_t lane = 0; lane < kWarpSize; ++lane)
    if (arguments[lane]) f(lane, *static_cast<Argument*>(arguments[lane]));
}

uint32_t reduced(Reduction reduction, uint32_t a, uint32_t b) {
  switch (reduction) {
    case Reduction::kMax: return std::max(a, b);
    case Reduction::kMin: return std::min(a, b);
    case Reduction::kMaxSigned: return static_cast<uint32_t>(std::max(static_cast<int32_t>(a), static_cast<int32_t>(b)));
    case Reduction::kMinSigned: return static_cast<uint32_t>(std::min(static_cast<int32_t>(a), static_cast<int32_t>(b)));
    case Reduction::kAdd: return a + b;
    case Reduction::kOr: return a | b;
    case Reduction::kAnd: return a & b;
    default: return a ^ b;
  }
}

}  // namespace

uint64_t shuffle(const Site& site, uint32_t mask, uint64_t value, uint32_t source) {
  source &= kWarpSize - 1;
  if (!(mask & 1u << source))
    fail("reads in " + text_of(site) + " from lane " + std::to_string(source) + ", which is not in the mask " +
         in_hexadecimal(mask));
  Shuffle argument{value, 0, source};
  warp_collective(site, mask, &argument, [](void* const* arguments) {
    for_lanes<Shuffle>(arguments,
                       [&](uint32_t, Shuffle& to) { to.result = static_cast<const Shuffle*>(arguments[to.source])->value; });
  });
  return argument.result;
}

uint32_t ballot(const Site& site, uint32_t mask, bool predicate) {
  Vote argument{predicate, 0};
  warp_collective(site, mask, &argument, [](void* const* arguments) {
    uint32_t votes = 0;
    for_lanes<Vote>(arguments, [&](uint32_t lane, Vote& vote) { votes |= static_cast<uint32_t>(vote.predicate) << lane; });
    for_lanes<Vote>(arguments, [&](uint32_t, Vote& vote) { vote.result = votes; });
  });
  return argument.result;
}

uint32_t reduce(const Site& site, uint32_t mask, uint32_t value, Reduction reduction) {
  Reduced argument{value, 0, reduction};
  warp_collective(site, mask, &argument, [](void* const* arguments) {
    const Reduced* first = nullptr;
    uint32_t result = 0;
    for_lanes<Reduced>(arguments, [&](uint32_t, Reduced& lane) {
      result = first ? reduced(lane.reduction, result, lane.value) : lane.value;
      first = &lane;
    });
    for_lanes<Reduced>(arguments, [&](uint32_t, Reduced& lane) { lane.result = result; });
  });
  return argument.result;
}

}  // namespace cuda_on_cpu
