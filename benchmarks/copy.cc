// Plain copies for benchmarks to be measured against: what memory alone would take, on as many threads as the kernels use.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class Body>
void on_threads(int threads, Body body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(body, t);
  body(0);
  for (auto& other : others) other.join();
}

/// The range of `count` that falls to thread t.
template <class Body>
void part(int64_t count, int t, int threads, Body body) {
  body(count * t / threads, count * (t + 1) / threads);
}

}  // namespace

extern "C" {

/// Reads the input twice (once for nothing, as for an amax) and writes `out_bytes` that depend on it.
void read_twice_and_write(const uint64_t* in, int64_t words, uint64_t* out, int64_t out_words, int threads) {
  on_threads(threads, [=](int t) {
    uint64_t seen = 0;
    part(words, t, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) seen |= in[i];
    });
    const int64_t each = words / out_words;
    part(out_words, t, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        uint64_t folded = 0;
        for (int64_t k = 0; k < each; ++k) folded |= in[i * each + k];
        out[i] = folded;
      }
    });
    asm volatile("" : : "r"(seen));
  });
}

void copy(const char* in, char* out, int64_t bytes, int threads) {
  on_threads(threads, [=](int t) {
    part(bytes, t, threads, [&](int64_t first, int64_t last) { std::memcpy(out + first, in + first, last - first); });
  });
}
}
