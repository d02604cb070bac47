// Right kernels: what they compute, that nothing is reported in any order of threads, and what is counted.
#include "../../xla_ffi/cuda/intrinsics.cuh"
#include "../cpp/check.h"
#include "execution/run.h"

using namespace jaxlowprec::cuda;
using cuda_on_cpu::Access;
using cuda_on_cpu::Array;
using cuda_on_cpu::in_every_order;
using cuda_on_cpu::run;
using cuda_on_cpu::Shape;

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

std::vector<int> counting(size_t n) {
  std::vector<int> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = static_cast<int>(i);
  return values;
}

// --- blocks and their threads

void writes_indices(int4* out) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
      make_int4(threadIdx.x + 10 * blockIdx.x, threadIdx.y + 10 * blockIdx.y, threadIdx.z + 10 * blockIdx.z, warpSize);
}
TEST(every_thread_of_every_block_runs_once) {
  in_every_order([] {
    Array<int4> out(2 * 3 * 4 * 5 * 3 * 2);
    CHECK_EQ(run({dim3(2, 3, 4), dim3(5, 3, 2)}, writes_indices, out.data()), cudaSuccess);
    size_t i = 0;
    for (int b = 0; b < 24; ++b)
      for (int t = 0; t < 30; ++t, ++i) {
        CHECK_EQ(out[i].x, t % 5 + 10 * (b % 2));
        CHECK_EQ(out[i].y, t / 5 % 3 + 10 * (b / 2 % 3));
        CHECK_EQ(out[i].z, t / 15 + 10 * (b / 6));
      }
    CHECK_EQ(out.unwritten(), 0u);
    CHECK_EQ(out.traffic().written, out.size() * sizeof(int4));
  });
}

struct Tile {
  int v[32][33];
};
void transposes(const int* in, int* out, int n) {
  Tile& tile = block_shared<Tile>();
  const int row = blockIdx.y * 32, column = blockIdx.x * 32, x = threadIdx.x;
  for (int y = threadIdx.y; y < 32; y += blockDim.y) tile.v[y][x] = __ldg(in + (row + y) * n + column + x);
  __syncthreads();
  for (int y = threadIdx.y; y < 32; y += blockDim.y) __stcs(out + (column + y) * n + row + x, tile.v[x][y]);
}
TEST(a_tile_goes_through_shared_memory_and_each_byte_moves_once) {
  const Array<int> in(counting(64 * 64), "in", Access::kReadOnly);
  in_every_order([&] {
    Array<int> out(64 * 64);
    cuda_on_cpu::reset_traffic();
    CHECK_EQ(run({dim3(2, 2), dim3(32, 8), sizeof(Tile)}, transposes, in.data(), out.data(), 64), cudaSuccess);
    for (int i = 0; i < 64 * 64; ++i) CHECK_EQ(out[i], i % 64 * 64 + i / 64);
    CHECK(in.traffic() == (cuda_on_cpu::Traffic{64 * 64 * 4, 0}));
    CHECK(cuda_on_cpu::traffic() == (cuda_on_cpu::Traffic{64 * 64 * 4, 64 * 64 * 4}));
  });
}

struct Halves {
  int totals[2];
  unsigned char bytes[64];
};
void uses_bytes_of_a_word(unsigned char* out) {
  Halves& shared = block_shared<Halves>();
  if (threadIdx.x == 0) shared.totals[0] = 0x40302010;
  shared.bytes[threadIdx.x] = static_cast<unsigned char>(threadIdx.x);  // four threads per word
  __syncthreads();
  const uint32_t word = *reinterpret_cast<const uint32_t*>(shared.bytes + threadIdx.x / 4 * 4);
  const unsigned char byte = reinterpret_cast<const unsigned char*>(shared.totals)[threadIdx.x % 4];
  __syncthreads();
  if (threadIdx.x < 16) *reinterpret_cast<uint32_t*>(shared.bytes + 4 * threadIdx.x) = 0;
  out[threadIdx.x] = static_cast<unsigned char>((word >> threadIdx.x % 4 * 8) + byte);
}
TEST(bytes_and_words_are_the_same_memory_and_neighbouring_bytes_are_not) {
  in_every_order([] {
    Array<unsigned char> out(64);
    CHECK_EQ(run({1, 64, sizeof(Halves)}, uses_bytes_of_a_word, out.data()), cudaSuccess);
    for (int i = 0; i < 64; ++i) CHECK_EQ(out[i], i + 16 * (i % 4 + 1));
    CHECK_EQ(out.traffic().written, 64u);
  });
}

void increments(int* v) { v[blockIdx.x * blockDim.x + threadIdx.x] += 1; }
TEST(a_launch_is_after_the_one_before) {
  Array<int> v(128);
  CHECK_EQ(cudaMemsetAsync(v.data(), 0, 128 * sizeof(int)), cudaSuccess);
  CHECK_EQ(run({4, 32}, increments, v.data()), cudaSuccess);
  CHECK_EQ(run({2, 64}, increments, v.data()), cudaSuccess);
  for (int i = 0; i < 128; ++i) CHECK_EQ(v[i], 2);
}

// --- barriers of a block

void votes_of_a_block(int* out) {
  const int i = threadIdx.x;
  const int none = __syncthreads_or(0), one = __syncthreads_or(i == 77), all = __syncthreads_and(i < 96),
            most = __syncthreads_and(i != 5), count = __syncthreads_count(i % 3 == 0);
  out[i] = none + 10 * one + 100 * all + 1000 * most + 10000 * count;
}
TEST(barriers_count_predicates) {
  in_every_order([] {
    Array<int> out(96);
    CHECK_EQ(run({1, 96}, votes_of_a_block, out.data()), cudaSuccess);
    for (int i = 0; i < 96; ++i) CHECK_EQ(out[i], 320110);
  });
}

void rotates_through_shared(int* out, int steps) {
  Tile& tile = block_shared<Tile>();
  int value = threadIdx.x;
  for (int step = 0; step < steps; ++step) {
    tile.v[0][0] = 0;
    (&tile.v[1][0])[threadIdx.x] = value;
    __syncthreads();
    value = (&tile.v[1][0])[(threadIdx.x + 1) % blockDim.x];
    __syncthreads();
  }
  out[threadIdx.x] = value;
}
void rotates_alone(int* out, int steps) {
  if (threadIdx.x >= 32) return;  // a warp that takes part in no barrier may go
  Tile& tile = block_shared<Tile>();
  int value = threadIdx.x;
  for (int step = 0; step < steps; ++step) {
    tile.v[0][threadIdx.x] = value;
    __syncwarp();
    value = tile.v[0][(threadIdx.x + 1) % 32];
    __syncwarp();
  }
  out[threadIdx.x] = value;
}
TEST(a_warp_orders_its_own_memory) {
  in_every_order([] {
    Array<int> out(32);
    CHECK_EQ(run({1, 64, sizeof(Tile)}, rotates_alone, out.data(), 5), cudaSuccess);
    for (int i = 0; i < 32; ++i) CHECK_EQ(out[i], (i + 5) % 32);
  });
}
TEST(a_block_of_1024_threads_orders_its_memory) {
  Array<int> out(1024);
  cuda_on_cpu::Reports reports;
  CHECK_EQ(run({1, 1024, sizeof(Tile) * 2}, rotates_through_shared, out.data(), 3), cudaErrorLaunchFailure);
  CHECK(reports.messages.at(0).find("byte 0 of shared memory") != std::string::npos);  // all write it
}

void passes_along_parts(int* out) {
  Tile& tile = block_shared<Tile>();
  int* const v = tile.v[0];
  const unsigned i = threadIdx.x;
  const unsigned half = i < 16 ? 0xFFFFu : 0xFFFF0000u, middle = 0x00FFFF00u;
  v[i] = i;
  __syncwarp(half);
  const int sum = v[i] + v[i ^ 15];  // within the half
  if (middle & 1u << i) __syncwarp(middle);
  // Lane 8 knows of lane 23's write by the second part, and of lane 31's, which lane 23 knew of, by both.
  out[i] = sum + (i == 8 ? v[31] : 0);
}
TEST(parts_of_a_warp_order_memory_and_pass_it_on) {
  in_every_order([] {
    Array<int> out(32);
    CHECK_EQ(run({1, 32, sizeof(Tile)}, passes_along_parts, out.data()), cudaSuccess);
    for (int i = 0; i < 32; ++i) CHECK_EQ(out[i], (i < 16 ? 15 : 47) + (i == 8 ? 31 : 0));
  });
}

// --- shuffles, votes, reductions

struct Shuffled {
  int broadcast, segment, exclusive_or, up, down, beyond;
  uint64_t wide;
};
void shuffles(Shuffled* out) {
  const int i = threadIdx.x;
  out[i] = {__shfl_sync(kAll, 100 + i, 7),
            __shfl_sync(kAll, 100 + i, 9, 8),
            __shfl_xor_sync(kAll, 100 + i, 16),
            __shfl_up_sync(kAll, 100 + i, 3),
            __shfl_down_sync(kAll, 100 + i, 3, 16),
            __shfl_xor_sync(kAll, 100 + i, 8, 8),
            __shfl_sync(kAll, (uint64_t{1} << 40) + i, i + 1)};
}
TEST(shuffles_read_the_lane_that_the_manual_says) {
  in_every_order([] {
    Array<Shuffled> out(32);
    CHECK_EQ(run({1, 32}, shuffles, out.data()), cudaSuccess);
    for (int i = 0; i < 32; ++i) {
      CHECK_EQ(out[i].broadcast, 107);
      CHECK_EQ(out[i].segment, 101 + i / 8 * 8);
      CHECK_EQ(out[i].exclusive_or, 100 + (i ^ 16));
      CHECK_EQ(out[i].up, 100 + (i < 3 ? i : i - 3));
      CHECK_EQ(out[i].down, 100 + (i % 16 > 12 ? i : i + 3));
      CHECK_EQ(out[i].beyond, 100 + (i & 8 ? i ^ 8 : i));
      CHECK_EQ(out[i].wide, (uint64_t{1} << 40) + (i + 1) % 32);
    }
  });
}

void votes(unsigned* out) {
  const unsigned i = threadIdx.x, odd = 0xAAAAAAAAu;
  unsigned sum = 0;
  if (i & 1)
    sum = __ballot_sync(odd, i < 8);
  else
    sum = __reduce_add_sync(~odd, i);
  out[i] = sum;
  out[32 + i] = __any_sync(kAll, i == 9) + 2 * __any_sync(kAll, 0) + 4 * __all_sync(kAll, 2) + 8 * __all_sync(kAll, i != 9);
  out[64 + i] = __reduce_max_sync(kAll, i ^ 21) + __reduce_min_sync(kAll, i + 100) +
                static_cast<unsigned>(__reduce_max_sync(kAll, -static_cast<int>(i) - 1)) + __reduce_or_sync(kAll, i) +
                __reduce_and_sync(kAll, i | 64);
}
TEST(votes_and_reductions_of_parts_of_a_warp) {
  in_every_order([] {
    Array<unsigned> out(96);
    CHECK_EQ(run({1, 32}, votes, out.data()), cudaSuccess);
    for (int i = 0; i < 32; ++i) {
      CHECK_EQ(out[i], i & 1 ? 0xAAu : 240u);
      CHECK_EQ(out[32 + i], 5u);
      CHECK_EQ(out[64 + i], 31u + 100 - 1 + 31 + 64);
    }
  });
}

// --- atomic operations

void collects(const int* in, int* sum, unsigned* greatest, unsigned* bits, float* total, unsigned* first) {
  Halves& shared = block_shared<Halves>();
  if (threadIdx.x < 2) shared.totals[threadIdx.x] = 0;
  __syncthreads();
  const int value = in[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&shared.totals[value & 1], value);
  __syncthreads();
  if (threadIdx.x < 2) atomicAdd(sum + threadIdx.x, shared.totals[threadIdx.x]);
  atomicMax(greatest, static_cast<unsigned>(value));
  atomicOr(bits, 1u << value % 32);
  atomicAdd(total, 0.5f);
  atomicCAS(first, kAll, blockIdx.x);
}
TEST(atomic_operations_of_blocks_and_threads_meet) {
  const Array<int> in(counting(256), "in");
  in_every_order([&] {
    auto sum = Array<int>::zeros(2);
    auto greatest = Array<unsigned>::zeros(1), bits = Array<unsigned>::zeros(1);
    auto total = Array<float>::zeros(1);
    const Array<unsigned> first(std::vector<unsigned>{kAll});
    CHECK_EQ(run({4, 64, sizeof(Halves)}, collects, in.data(), sum.data(), greatest.data(), bits.data(), total.data(),
                 first.data()),
             cudaSuccess);
    CHECK_EQ(sum[0], 128 * 127);
    CHECK_EQ(sum[1], 128 * 128);
    CHECK_EQ(greatest[0], 255u);
    CHECK_EQ(bits[0], kAll);
    CHECK_EQ(total[0], 128.0f);
    CHECK_EQ(first[0], 0u);
  });
}

void sums_of_a_warp(int* sum, int* out) {
  Halves& shared = block_shared<Halves>();
  if (threadIdx.x == 0) shared.totals[0] = 0;
  __syncwarp();
  atomicAdd(&shared.totals[0], 1);
  atomicAdd(sum, 1);
  __syncwarp();
  out[threadIdx.x] = shared.totals[0] + *sum;
}
TEST(an_atomic_sum_of_a_warp_is_complete_after_syncwarp) {
  in_every_order([] {
    auto sum = Array<int>::zeros(1, "sum");
    Array<int> out(32);
    CHECK_EQ(run({1, 32, sizeof(Halves)}, sums_of_a_warp, sum.data(), out.data()), cudaSuccess);
    for (int i = 0; i < 32; ++i) CHECK_EQ(out[i], 64);
  });
}

// --- asynchronous copies

struct Stages {
  uint4 v[3][64];
};
void pipelines(const uint4* in, uint4* out, int steps) {
  Stages& stages = block_shared<Stages>();
  const int i = threadIdx.x;
  const auto load = [&](int step) {
    if (step < steps) copy_async16(&stages.v[step % 3][i], in + step * 64 + i);
    copy_async_commit();
  };
  load(0);
  load(1);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<1>();
    __syncthreads();
    load(step + 2);
    out[step * 64 + i] = stages.v[step % 3][63 - i];
  }
}
TEST(asynchronous_copies_in_three_stages) {
  const std::vector<int> words = counting(7 * 64 * 4);
  const Array<int> in(words, "in", Access::kReadOnly);
  in_every_order([&] {
    Array<int> out(words.size());
    cuda_on_cpu::reset_traffic();
    CHECK_EQ(run({1, 64, sizeof(Stages)}, pipelines, reinterpret_cast<const uint4*>(in.data()),
                 reinterpret_cast<uint4*>(out.data()), 7),
             cudaSuccess);
    for (int i = 0; i < 7 * 64; ++i) CHECK_EQ(out[4 * i], 4 * (i / 64 * 64 + 63 - i % 64));
    CHECK_EQ(in.traffic().read, words.size() * 4);
  });
}

// --- launches

void does_nothing() {}
void needs_much() {}
TEST(launches_have_limits) {
  CHECK_EQ(run({1, 1025}, does_nothing), cudaErrorInvalidConfiguration);
  CHECK_EQ(run({0, 32}, does_nothing), cudaErrorInvalidConfiguration);
  CHECK_EQ(run({dim3(1, 65536), 32}, does_nothing), cudaErrorInvalidConfiguration);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  CHECK_EQ(cudaPeekAtLastError(), cudaSuccess);
  CHECK_EQ(run({1, 32, 48 << 10}, does_nothing), cudaSuccess);
  CHECK_EQ(run({1, 32, (48 << 10) + 1}, does_nothing), cudaErrorInvalidValue);
  CHECK_EQ(std::string(cudaGetErrorName(cudaGetLastError())), "cudaErrorInvalidValue");
}

TEST(shared_memory_above_48_kib_is_asked_for_and_depends_on_the_architecture) {
  const cuda_on_cpu::Device before = cuda_on_cpu::device();
  CHECK_EQ(before.architecture, JLP_TEST_CUDA_ARCH);
  for (const auto& [architecture, kib] : {std::pair{800, 163}, {890, 99}, {900, 227}, {1000, 227}, {1200, 99}}) {
    cuda_on_cpu::device().architecture = architecture;
    const int limit = kib << 10;
    CHECK_EQ(cudaFuncSetAttribute(needs_much, cudaFuncAttributeMaxDynamicSharedMemorySize, limit + 1),
             cudaErrorInvalidValue);
    CHECK_EQ(cudaFuncSetAttribute(needs_much, cudaFuncAttributeMaxDynamicSharedMemorySize, limit), cudaSuccess);
    CHECK_EQ(run({1, 32, static_cast<size_t>(limit)}, needs_much), cudaSuccess);
    int found = 0;
    CHECK_EQ(cudaDeviceGetAttribute(&found, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
    CHECK_EQ(found, limit);
  }
  cuda_on_cpu::device() = before;
  cudaGetLastError();
}

TEST(a_test_chooses_the_device) {
  const cuda_on_cpu::Device before = cuda_on_cpu::device();
  cuda_on_cpu::device() = {800, 108};
  int value = 0, blocks = 0;
  CHECK_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  CHECK_EQ(value, 108);
  CHECK_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  CHECK_EQ(value, 8);
  CHECK_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, does_nothing, 256, 0), cudaSuccess);
  CHECK_EQ(blocks, 8);
  CHECK_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, does_nothing, 256, 40 << 10), cudaSuccess);
  CHECK_EQ(blocks, 4);  // 41 KiB each, of 164
  cuda_on_cpu::device() = before;
}

void marks_its_block(unsigned char* out, int64_t n) {
  const int64_t i = (blockIdx.y * int64_t{gridDim.x} + blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 1;
}
void marks_its_block_in_32_bits(unsigned char* out, int n) {
  const int i = static_cast<int>((blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x);
  if (i < n) out[i] = 1;
}
TEST(a_few_blocks_of_a_launch_beyond_2_to_the_31_elements) {
  constexpr int64_t n = (int64_t{1} << 33) - 100;
  const dim3 grid(1 << 15, 1 << 10);  // of 256 threads: 2^33
  Array<unsigned char> out(n, "out");
  cuda_on_cpu::options().only_blocks = {dim3(0, 0), dim3(5, 900), dim3((1 << 15) - 1, (1 << 10) - 1)};
  CHECK_EQ(run({grid, 256}, marks_its_block, out.data(), n), cudaSuccess);
  CHECK_EQ(out.traffic().written, 3 * 256u - 100);
  CHECK_EQ(out[n - 1] + out[900 * (int64_t{1} << 23) + 5 * 256] + out[0] + out[256], 3);
  cuda_on_cpu::Reports reports;
  CHECK_EQ(run({grid, 256}, marks_its_block_in_32_bits, out.data(), INT32_MAX), cudaErrorLaunchFailure);
  cuda_on_cpu::options().only_blocks.clear();
}

TEST(copies_of_the_host_have_bounds) {
  Array<int> to(8, "to");
  const int from[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  CHECK_EQ(cudaMemcpyAsync(to.data(), from, 28, cudaMemcpyHostToDevice), cudaSuccess);
  CHECK_EQ(to[6], 7);
  CHECK_EQ(to.unwritten(), 4u);
  CHECK_EQ(cudaMemsetAsync(to.data() + 7, 0, 3), cudaSuccess);
  CHECK_EQ(to.unwritten(), 1u);
  CHECK_EQ(cudaMemcpyAsync(to.data() + 1, from, 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemsetAsync(to.data(), 0, 33), cudaErrorInvalidValue);
  cudaGetLastError();
}

}  // namespace
