// parallel_for on pools that behave as XLA's may: busy, late, or with every worker itself a caller. A hang is a failure:
// ctest has a timeout. Run with ThreadSanitizer to see that nothing is shared without order.
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../xla_ffi/cpu/run.h"
#include "../../xla_ffi/numerics/hadamard.h"
#include "check.h"

namespace jaxlowprec {
namespace {

/// Worker threads that take tasks from a queue. Its end waits for the tasks that are left.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(workers_.size()); }

  template <class Task>
  void Schedule(Task&& task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::forward<Task>(task));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

/// A pool whose workers are all busy elsewhere: its tasks start when the test says so.
struct BusyPool {
  int64_t threads;
  std::vector<std::function<void()>> tasks;

  int64_t num_threads() const { return threads; }
  template <class Task>
  void Schedule(Task&& task) {
    tasks.emplace_back(std::forward<Task>(task));
  }
};

TEST(each_chunk_runs_exactly_once) {
  for (const int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    for (const int64_t chunks : {0, 1, 2, 3, 7, 64, 1000})
      for (const int64_t most_threads : {0, 1, 2, 64}) {
        std::vector<std::atomic<int>> runs(chunks);
        parallel_for(pool, chunks, most_threads, [&](int64_t chunk) { ++runs[chunk]; });
        for (int64_t i = 0; i < chunks; ++i) CHECK_EQ(runs[i].load(), 1);
      }
  }
}

TEST(one_thread_at_most_runs_inline_and_in_order) {
  BusyPool many{8, {}}, one{1, {}};
  for (const int64_t most_threads : {-1, 0, 1}) {
    std::vector<int64_t> order;
    parallel_for(many, 5, most_threads, [&](int64_t chunk) { order.push_back(chunk); });
    CHECK((order == std::vector<int64_t>{0, 1, 2, 3, 4}));
  }
  parallel_for(one, 5, 64, [](int64_t) {});
  parallel_for(many, 1, 64, [](int64_t) {});
  CHECK(many.tasks.empty() && one.tasks.empty());
}

TEST(no_more_threads_take_part_than_are_wanted_or_of_use) {
  BusyPool pool{8, {}};
  const auto helpers = [&](int64_t chunks, int64_t most_threads) {
    pool.tasks.clear();
    parallel_for(pool, chunks, most_threads, [](int64_t) {});
    return pool.tasks.size();
  };
  CHECK_EQ(helpers(100, 3), 2u);    // the caller is one of the three
  CHECK_EQ(helpers(100, 100), 7u);  // of eight
  CHECK_EQ(helpers(4, 100), 3u);    // as many as there are chunks
}

TEST(a_caller_does_not_wait_for_tasks_to_start_and_late_ones_touch_nothing) {
  BusyPool pool{4, {}};
  int runs = 0;
  {
    const auto body = std::make_unique<std::function<void(int64_t)>>([&](int64_t) { ++runs; });
    parallel_for(pool, 10, 4, *body);
  }
  CHECK_EQ(runs, 10);
  CHECK_EQ(pool.tasks.size(), 3u);
  for (const auto& task : pool.tasks) task();  // the body is gone: AddressSanitizer sees a late task that calls it
  CHECK_EQ(runs, 10);
}

TEST(late_tasks_race_with_nothing_after_the_return) {
  Pool pool(3);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> results(4);  // plain memory, gone after the round: helpers must be done with it, and visibly so
    parallel_for(pool, 4, 4, [&results, round](int64_t chunk) {
      std::this_thread::yield();  // leave some chunks to the others
      results[chunk] = round + chunk;
    });
    for (int64_t i = 0; i < 4; ++i) CHECK_EQ(results[i], round + i);
  }
}

/// Calls parallel_for from within its own body.
void nest(Pool& pool, int depth, std::atomic<int64_t>& leaves) {
  parallel_for(pool, 3, 3, [&](int64_t) { depth ? nest(pool, depth - 1, leaves) : void(++leaves); });
}

TEST(nested_calls_do_not_deadlock) {
  Pool pool(2);
  std::atomic<int64_t> leaves{0};
  nest(pool, 5, leaves);
  CHECK_EQ(leaves.load(), 729);
}

/// The links of a chain run one after another, each scheduled on the pool by the one before and each a caller.
void run_chain(Pool& pool, int links, std::atomic<int64_t>& work, std::atomic<int>& chains_left) {
  pool.Schedule([&pool, links, &work, &chains_left] {
    parallel_for(pool, 50, 2, [&](int64_t) { ++work; });
    links > 1 ? run_chain(pool, links - 1, work, chains_left) : void(--chains_left);
  });
}

TEST(workers_that_are_all_callers_do_not_deadlock) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int64_t> work{0};
    std::atomic<int> chains_left{6};
    Pool pool(2);
    for (int chain = 0; chain < 6; ++chain) run_chain(pool, 3, work, chains_left);
    while (chains_left.load() > 0) std::this_thread::yield();
    CHECK_EQ(work.load(), 6 * 3 * 50);
  }
}

// --- whole operations on the pool (run.h): large enough to be cut up

std::vector<uint16_t> random_bf16(int64_t count) {
  std::mt19937 random(1);
  std::vector<uint16_t> x(count);
  for (uint16_t& bits : x) bits = static_cast<uint16_t>((random() & 0x8000u) + 0x3E00u + random() % 0x300u);
  return x;
}

TEST(amax_on_threads_is_the_amax_of_one_thread) {
  constexpr int64_t kSize = 1024;
  const std::vector<uint16_t> x = random_bf16(kSize * kSize);
  const auto amax = [&](auto& pool) {
    std::vector<uint32_t> found(2);
    const AmaxProblem p{x.data(), ElementType::kBF16, 1, kSize, kSize, &found[0], &found[1], kDefaultSignMask};
    CHECK(cost(p) / kBreakEven >= 2);
    run(pool, p);
    return found;
  };
  Pool pool(4);
  BusyPool alone{1, {}};
  CHECK(amax(pool) == amax(alone));
}

TEST(quantize_on_threads_gives_the_bytes_of_one_thread) {
  constexpr int64_t kSize = 512;
  const std::vector<uint16_t> x = random_bf16(kSize * kSize);
  const float amax = 8;
  const auto quantize = [&](auto& pool) {
    std::vector<uint8_t> bytes(kSize * kSize / 8 * 9);
    uint8_t* row_scale = bytes.data() + kSize * kSize / 2;
    uint8_t* column_data = row_scale + kSize * kSize / 16;
    uint8_t* column_scale = column_data + kSize * kSize / 2;
    const QuantizeProblem p{x.data(),
                            ElementType::kBF16,
                            1,
                            kSize,
                            kSize,
                            {CodeType::kE2M1, Scaling::kTwoLevel, 16, false, ScaleRule::kUp, false, 0},
                            false,
                            {&amax, bytes.data(), row_scale, {}},
                            {&amax, column_data, column_scale, {}},
                            true,
                            kDefaultSignMask};
    CHECK(cost(p) / kBreakEven >= 2);
    run(pool, p);
    return bytes;
  };
  Pool pool(4);
  BusyPool alone{1, {}};
  CHECK(quantize(pool) == quantize(alone));
}

}  // namespace
}  // namespace jaxlowprec
