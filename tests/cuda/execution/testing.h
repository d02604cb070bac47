// The interface between a test and the machine that executes kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "vector_types.h"

namespace cuda_on_cpu {

/// The device that cudaDeviceGetAttribute describes.
struct Device {
  int architecture = 900;  // JLP_TEST_CUDA_ARCH
  int multiprocessors = 132;
  int index = 0;            // the current device: launch code may remember what a device answered
  int resident_blocks = 0;  // what occupancy queries answer; 0: by threads and shared memory, since registers are unknown

  int shared_per_block_limit() const;  // with cudaFuncAttributeMaxDynamicSharedMemorySize
  int shared_per_multiprocessor() const;
  int threads_per_multiprocessor() const;
};
Device& device();

/// How many occupancy queries there have been.
int occupancy_queries();
/// How often a kernel was allowed shared memory.
int attribute_settings();

/// Which of the threads that can go on goes on. A right kernel gives the same bytes in every order.
enum class Order { kForward, kReverse, kRandom };

struct Options {
  Order order = Order::kForward;
  uint64_t seed = 1;              // of kRandom
  std::vector<dim3> only_blocks;  // the indices of the blocks to execute; empty: all of them
};
Options& options();

/// Runs f in each order, the random one anew every time.
template <class F>
void in_every_order(F f) {
  const Order before = options().order;
  for (const Order order : {Order::kForward, Order::kReverse, Order::kRandom}) {
    options().order = order;
    f();
  }
  options().order = before;
  ++options().seed;
}

/// Takes what the checks report while it lives, newest collector first. A report that nobody takes is printed and fails the
/// program. A launch ends with its first report and returns cudaErrorLaunchFailure.
class Reports {
 public:
  Reports();
  ~Reports();
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;
  std::vector<std::string> messages;

 private:
  Reports* outer_;
};

struct Traffic {
  uint64_t read = 0, written = 0;  // bytes as the threads asked for them; an atomic operation writes
  bool operator==(const Traffic& b) const { return read == b.read && written == b.written; }
};
/// Of all arrays since reset_traffic.
Traffic traffic();
void reset_traffic();

enum class Access { kReadWrite, kReadOnly };

struct Memory;
Memory* allocate(size_t bytes, const char* name, bool initialised, Access access);
void release(Memory* memory);
void* address(const Memory* memory);
Traffic traffic(const Memory* memory);
size_t count_unwritten(const Memory* memory);

/// Global memory, that kernels may use while it lives. Pages are mapped when they are used, so that an array may be larger
/// than the machine's memory. `name` is what reports call it.
template <class T>
class Array {
 public:
  /// Never written: reading it is reported.
  explicit Array(size_t size, const char* name = "array") : Array(size, name, false, Access::kReadWrite) {}
  explicit Array(const std::vector<T>& values, const char* name = "array", Access access = Access::kReadWrite)
      : Array(values.size(), name, true, access) {
    if (size_) std::memcpy(data(), values.data(), size_ * sizeof(T));
  }
  static Array zeros(size_t size, const char* name = "array") { return Array(size, name, true, Access::kReadWrite); }
  Array(Array&& other) : memory_(other.memory_), size_(other.size_) { other.memory_ = nullptr; }
  Array& operator=(Array&&) = delete;
  ~Array() {
    if (memory_) release(memory_);
  }

  T* data() const { return static_cast<T*>(address(memory_)); }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data()[i]; }  // by the test, unchecked
  std::vector<T> values() const { return std::vector<T>(data(), data() + size_); }
  Traffic traffic() const { return cuda_on_cpu::traffic(memory_); }
  /// Bytes that no kernel, copy or initialisation wrote.
  size_t unwritten() const { return count_unwritten(memory_); }

 private:
  Array(size_t size, const char* name, bool initialised, Access access)
      : memory_(allocate(size * sizeof(T), name, initialised, access)), size_(size) {}
  Memory* memory_;
  size_t size_;
};

}  // namespace cuda_on_cpu
