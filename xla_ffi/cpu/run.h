// Runs one operation: serially when it is small, else in chunks on the pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace jaxlowprec {

// --- Runs chunks on a thread pool with the calling thread taking part.
//
// XLA's kernels run on the same pool that they may schedule on, so a caller must never wait for a task to start: with every
// worker waiting, none ever would. Here the caller pulls chunks like any worker and at the end waits only for chunks that
// somebody has already begun. Tasks that start later find nothing left and touch nothing but the shared counters.

/// `pool` has num_threads() and Schedule(task). `body(chunk)` is called once for each chunk in [0, chunks), by at most
/// `most_threads` threads.
template <class Pool, class Body>
void parallel_for(Pool& pool, int64_t chunks, int64_t most_threads, const Body& body) {
  const int64_t helpers = std::min<int64_t>({pool.num_threads(), chunks, most_threads}) - 1;
  if (helpers < 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
    return;
  }
  struct Counters {
    std::atomic<int64_t> next{0}, finished{0};
  };
  const auto counters = std::make_shared<Counters>();
  const auto pull = [counters, chunks, &body] {
    for (int64_t chunk; (chunk = counters->next.fetch_add(1)) < chunks;) {
      body(chunk);
      counters->finished.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([pull] { pull(); });
  pull();
  while (counters->finished.load(std::memory_order_acquire) < chunks) std::this_thread::yield();
}

// Estimated time of a problem on one AVX2 core, in picoseconds: exact enough to tell 20 us from 200.
inline int64_t cost(const AmaxProblem& p) { return p.batch * p.rows * p.columns * (p.rotated ? 150 : 50); }
inline int64_t cost(const LineAmaxesProblem& p) { return p.batch * p.rows * p.columns * 150; }
inline int64_t cost(const QuantizeProblem& p) {
  const int64_t directions = (p.rowwise.data ? 1 : 0) + (p.columnwise.data ? 1 : 0);
  return p.batch * p.rows * p.columns * directions * 500;
}
inline int64_t cost(const RowScaledQuantizeProblem& p) { return p.batch * p.rows * p.columns * 550; }
inline int64_t cost(const DequantizeProblem& p) { return p.batch * p.rows * p.columns * 400; }
inline int64_t cost(const HadamardProblem& p) { return p.batch * p.rows * p.columns * 300; }
inline int64_t cost(const Int4FakeQuantizeProblem& p) { return p.batch * p.size() * 400; }
inline int64_t cost(const Int4QuantizeProblem& p) { return p.batch * p.size() * 400; }
inline int64_t cost(const Int4DequantizeProblem& p) { return p.batch * p.size() * 300; }
inline int64_t cost(const MatmulProblem& p) {
  const bool int8 = p.a.format.code == CodeType::kInt8;
  const int64_t product = p.packed() ? 12 : int8 ? 15 : 25, unpack = p.packed() ? 150 : int8 ? 50 : 300;
  return p.batch * p.depth() * (p.rows * p.columns * product + (p.rows + p.columns) * unpack);
}

// bfloat16 is looked up in tables.
inline int64_t cost(const ActivationProblem& p) { return p.batch * p.size * (p.type == ElementType::kBF16 ? 400 : 1500); }
inline int64_t cost(const ActivationGradientProblem& p) {
  return p.batch * p.size * (p.type == ElementType::kBF16 ? 700 : 2000);
}
inline int64_t cost(const ActivationQuantizeProblem& p) {
  return cost(static_cast<const ActivationProblem&>(p)) + cost(p.quantize);
}
inline int64_t cost(const ActivationGradientQuantizeProblem& p) {
  return cost(static_cast<const ActivationGradientProblem&>(p)) + cost(p.quantize[0]) * (p.up ? 2 : 1);
}
inline int64_t cost(const NormProblem& p) { return p.batch * p.rows * p.columns * 300; }
inline int64_t cost(const NormQuantizeProblem& p) { return p.batch * p.rows * p.columns * 300 + cost(p.quantize); }
inline int64_t cost(const NormGradientProblem& p) { return p.batch * p.rows * p.columns * 500; }
inline int64_t cost(const SumOverRowsProblem& p) { return p.batch * p.rows * p.columns * 60; }
inline int64_t cost(const AddPartsProblem& p) { return p.batch * p.parts * p.columns * 100; }
inline int64_t cost(const MomentsProblem& p) { return p.batch * p.size * 100; }
inline int64_t cost(const OutliersProblem& p) { return p.batch * p.rows * p.columns * 100; }
inline int64_t cost(const SumsProblem& p) { return p.batch * p.rows * p.columns * 2000; }

inline int64_t cost(const OptimizerUpdateProblem& p) {
  const int64_t coded = (p.mu.codes ? 1000 : 0) + (p.nu.codes ? 1000 : 0), drawn = p.drawn() ? 1000 : 0;
  return p.batch * p.rows * p.columns * (1000 + coded + drawn);
}

inline int64_t cost(const WeightOnlyProblem& p) {
  const int64_t product = 25, unpack = 50;
  return p.batch * p.depth * (p.rows * p.columns * product + (p.rows + p.columns) * unpack);
}

/// The least work per thread, in picoseconds. Waking a sleeping worker costs the caller 8 us, and the worker starts 30 us
/// later, so one thread does less work than this sooner.
constexpr int64_t kBreakEven = 50'000'000;

/// Problems of one kind, their chunks taken as one list: small ones share a start.
template <class Pool, class Problem>
void run_all(Pool& pool, const Problem* problems, int64_t count) {
  const Kernels& k = kernels();
  std::vector<int64_t> ends;  // of each problem's chunks
  int64_t chunks = 0, total_cost = 0;
  for (int64_t i = 0; i < count; ++i) {
    chunks += chunks_entry(k, problems[i])(problems[i]);
    total_cost += cost(problems[i]);
    ends.push_back(chunks);
  }
  // A cast follows the amax of the same array, whose end is still in the cache.
  constexpr bool kBackwards = std::is_same<Problem, QuantizeProblem>::value;
  parallel_for(pool, chunks, total_cost / kBreakEven, [&](int64_t i) {
    const int64_t at = kBackwards ? chunks - 1 - i : i;
    const int64_t which = std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
    const Problem& problem = problems[which];
    chunk_entry(k, problem)(problem, which > 0 ? at - ends[which - 1] : at);
  });
}

template <class Pool, class Problem>
void run_all(Pool& pool, const std::vector<Problem>& problems) {
  run_all(pool, problems.data(), static_cast<int64_t>(problems.size()));
}

template <class Pool, class Problem>
void run(Pool& pool, const Problem& problem) {
  run_all(pool, &problem, 1);
}

}  // namespace jaxlowprec
