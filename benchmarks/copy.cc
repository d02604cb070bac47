// Plain copies for benchmarks to be measured against: what memory alone would take, on as many threads as the kernels use.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kChunk = 16 * 1024;  // bytes of input

template <class Body>
void on_threads(int threads, Body body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(body, t);
  body(0);
  for (auto& other : others) other.join();
}

/// The chunks of `bytes` that fall to thread t.
template <class Body>
void chunks(int64_t bytes, int t, int threads, Body body) {
  const int64_t count = (bytes + kChunk - 1) / kChunk;
  for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i)
    body(i * kChunk, std::min((i + 1) * kChunk, bytes));
}

void read(const char* in, int64_t bytes) {
  uint64_t seen = 0;
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, in + i, sizeof word);
    seen |= word;
  }
  asm volatile("" : : "r"(seen));
}

}  // namespace

extern "C" {

/// Reads the input once, or twice (as for an amax first), and writes `out_bytes` of it, no more than there are.
void read_and_write(const char* in, int64_t bytes, char* out, int64_t out_bytes, int times, int threads) {
  on_threads(threads, [=](int t) {
    if (times > 1) chunks(bytes, t, threads, [&](int64_t first, int64_t last) { read(in + first, last - first); });
    const double share = static_cast<double>(out_bytes) / static_cast<double>(bytes);
    chunks(bytes, t, threads, [&](int64_t first, int64_t last) {
      read(in + first, last - first);
      const auto from = static_cast<int64_t>(share * first), to = std::min(static_cast<int64_t>(share * last), out_bytes);
      std::memcpy(out + from, in + first, to - from);
    });
  });
}

void copy(const char* in, char* out, int64_t bytes, int threads) {
  on_threads(threads, [=](int t) {
    chunks(bytes, t, threads, [&](int64_t first, int64_t last) { std::memcpy(out + first, in + first, last - first); });
  });
}
}
