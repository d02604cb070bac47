// Runs chunks on a thread pool with the calling thread taking part.
//
// XLA's kernels run on the same pool that they may schedule on, so a caller must never wait for a task to start: with every
// worker waiting, none ever would. Here the caller pulls chunks like any worker and at the end waits only for chunks that
// somebody has already begun. Tasks that start later find nothing left and touch nothing but the shared counters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace jaxlowprec {

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

}  // namespace jaxlowprec
