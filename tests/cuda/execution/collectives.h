// What the threads of a warp or a block do together. Each names the line it is at, so that threads waiting at different ones
// are found.
#pragma once

#include <cstdint>
#include <cstring>

namespace cuda_on_cpu {

struct Site {
  const char* operation;  // null: nowhere
  const char* file;
  int line;
};

#define CUDA_ON_CPU_LINE const char *file = __builtin_FILE(), int line = __builtin_LINE()

/// Waits for the other threads of the block; gives how many of them said `predicate`.
int block_barrier(const Site& site, bool predicate);

/// Given the arguments of a warp's lanes, null for those that do not take part, computes everyone's results in place.
using Combine = void (*)(void* const* arguments);
/// Waits for the lanes of `mask`; the last to come combines. `orders` memory among them, as only __syncwarp does.
void warp_collective(const Site& site, uint32_t mask, void* argument, Combine combine, bool orders = false);

uint32_t lane();
/// The value of `source`, a lane of `mask`.
uint64_t shuffle(const Site& site, uint32_t mask, uint64_t value, uint32_t source);
uint32_t ballot(const Site& site, uint32_t mask, bool predicate);
enum class Reduction { kMax, kMin, kMaxSigned, kMinSigned, kAdd, kOr, kAnd, kXor };
uint32_t reduce(const Site& site, uint32_t mask, uint32_t value, Reduction reduction);

template <class T>
T shuffle(const Site& site, uint32_t mask, T value, uint32_t source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "the types that CUDA shuffles");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(site, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// The functions that intrinsics.cuh calls instead of PTX.
void* shared_memory();
void copy_async(void* shared, const void* global, uint32_t bytes);
void zero_async(void* shared, uint32_t bytes);  // cp.async of no bytes of the source
void copy_async_commit();
void copy_async_wait(int pending);
void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], CUDA_ON_CPU_LINE);
void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int32_t (&c)[4],
                     CUDA_ON_CPU_LINE);
void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row, CUDA_ON_CPU_LINE);

}  // namespace cuda_on_cpu

inline void __syncthreads(CUDA_ON_CPU_LINE) { cuda_on_cpu::block_barrier({"__syncthreads", file, line}, false); }
inline int __syncthreads_count(int predicate, CUDA_ON_CPU_LINE) {
  return cuda_on_cpu::block_barrier({"__syncthreads_count", file, line}, predicate != 0);
}
inline int __syncthreads_or(int predicate, CUDA_ON_CPU_LINE) {
  return cuda_on_cpu::block_barrier({"__syncthreads_or", file, line}, predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate, CUDA_ON_CPU_LINE) {
  return cuda_on_cpu::block_barrier({"__syncthreads_and", file, line}, predicate == 0) == 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, CUDA_ON_CPU_LINE) {
  cuda_on_cpu::warp_collective({"__syncwarp", file, line}, mask, nullptr, nullptr, true);
}

/// `width` lanes, a power of two, shuffle among themselves; who would read outside of them gets its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_ON_CPU_LINE) {
  const uint32_t first = cuda_on_cpu::lane() & ~static_cast<uint32_t>(width - 1);
  return cuda_on_cpu::shuffle({"__shfl_sync", file, line}, mask, value, first + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, CUDA_ON_CPU_LINE) {
  const uint32_t lane = cuda_on_cpu::lane(), last = lane | (width - 1), source = lane ^ distance;
  return cuda_on_cpu::shuffle({"__shfl_xor_sync", file, line}, mask, value, source > last ? lane : source);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, CUDA_ON_CPU_LINE) {
  const uint32_t lane = cuda_on_cpu::lane(), within = lane & (width - 1);
  return cuda_on_cpu::shuffle({"__shfl_up_sync", file, line}, mask, value, distance > within ? lane : lane - distance);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, CUDA_ON_CPU_LINE) {
  const uint32_t lane = cuda_on_cpu::lane(), above = width - 1 - (lane & (width - 1));
  return cuda_on_cpu::shuffle({"__shfl_down_sync", file, line}, mask, value, distance > above ? lane : lane + distance);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_LINE) {
  return cuda_on_cpu::ballot({"__ballot_sync", file, line}, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_LINE) {
  return cuda_on_cpu::ballot({"__any_sync", file, line}, mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_ON_CPU_LINE) {
  return cuda_on_cpu::ballot({"__all_sync", file, line}, mask, predicate == 0) == 0;
}

#define CUDA_ON_CPU_REDUCTION(name, type, kind)                                                                        \
  inline type name(unsigned mask, type value, CUDA_ON_CPU_LINE) {                                                      \
    return cuda_on_cpu::reduce({#name, file, line}, mask, static_cast<uint32_t>(value), cuda_on_cpu::Reduction::kind); \
  }
CUDA_ON_CPU_REDUCTION(__reduce_max_sync, unsigned, kMax)
CUDA_ON_CPU_REDUCTION(__reduce_max_sync, int, kMaxSigned)
CUDA_ON_CPU_REDUCTION(__reduce_min_sync, unsigned, kMin)
CUDA_ON_CPU_REDUCTION(__reduce_min_sync, int, kMinSigned)
CUDA_ON_CPU_REDUCTION(__reduce_add_sync, unsigned, kAdd)
CUDA_ON_CPU_REDUCTION(__reduce_add_sync, int, kAdd)
CUDA_ON_CPU_REDUCTION(__reduce_or_sync, unsigned, kOr)
CUDA_ON_CPU_REDUCTION(__reduce_and_sync, unsigned, kAnd)
CUDA_ON_CPU_REDUCTION(__reduce_xor_sync, unsigned, kXor)
#undef CUDA_ON_CPU_REDUCTION

// Atomic operations, on global and shared memory.
int atomicAdd(int* address, int value);
unsigned atomicAdd(unsigned* address, unsigned value);
unsigned long long atomicAdd(unsigned long long* address, unsigned long long value);
float atomicAdd(float* address, float value);
int atomicMax(int* address, int value);
unsigned atomicMax(unsigned* address, unsigned value);
int atomicMin(int* address, int value);
unsigned atomicMin(unsigned* address, unsigned value);
unsigned atomicOr(unsigned* address, unsigned value);
unsigned atomicAnd(unsigned* address, unsigned value);
unsigned atomicExch(unsigned* address, unsigned value);
unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value);
int atomicCAS(int* address, int expected, int value);
