// Wrong kernels, each of which must be reported, and what the report says.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "../../xla_ffi/cuda/intrinsics.cuh"
#include "../cpp/check.h"
#include "execution/run.h"

using namespace jaxlowprec::cuda;
using cuda_on_cpu::Access;
using cuda_on_cpu::Array;
using cuda_on_cpu::run;
using cuda_on_cpu::Shape;

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;

struct Shared {
  alignas(16) int v[256];
  int behind[64];
};
Shared& memory() { return block_shared<Shared>(); }

/// Runs it in every order: each must end with one report that has the words in it.
template <class... Parameter, class... Given>
void must_report(const char* words, int line, Shape shape, void (*kernel)(Parameter...), Given... given) {
  cuda_on_cpu::in_every_order([&] {
    cuda_on_cpu::Reports reports;
    const cudaError_t error = run(shape, kernel, given...);
    const std::string message = reports.messages.empty() ? "nothing" : reports.messages[0];
    if (error != cudaErrorLaunchFailure || reports.messages.size() != 1 || message.find(words) == std::string::npos ||
        message.find("reports_test.cc:") == std::string::npos)
      check::fail(__FILE__, line, "'" + message + "' does not say '" + words + "'");
  });
}
#define MUST_REPORT(words, ...) must_report(words, __LINE__, __VA_ARGS__)

constexpr Shape two_warps() { return {1, 64, sizeof(Shared)}; }
constexpr Shape one_warp() { return {1, 32, sizeof(Shared)}; }

// --- barriers that are missing

void reads_without_barrier(int* out) {
  const unsigned i = threadIdx.x;
  memory().v[i] = 1;
  __syncthreads();
  memory().v[i] = 2;
  out[i] = memory().v[i ^ 32];
}
TEST(a_read_of_another_warps_write_needs_a_barrier) {
  Array<int> out(64);
  MUST_REPORT("with no barrier since", two_warps(), reads_without_barrier, out.data());
}

void overwrites_in_a_loop(int* out) {
  for (int step = 0; step < 3; ++step) {
    memory().v[threadIdx.x] = 7;  // equal values: bytes cannot tell
    __syncthreads();
    out[threadIdx.x] = memory().v[63 - threadIdx.x];
  }
}
TEST(a_buffer_used_again_needs_a_barrier_before) {
  Array<int> out(64);
  MUST_REPORT("with no barrier since", two_warps(), overwrites_in_a_loop, out.data());
}

void reads_without_syncwarp(int* out) {
  memory().v[threadIdx.x] = 1;
  __syncwarp();
  memory().v[threadIdx.x] = 2;
  out[threadIdx.x] = memory().v[threadIdx.x ^ 1];
}
TEST(a_read_of_another_lanes_write_needs_a_syncwarp) {
  Array<int> out(32);
  MUST_REPORT("with no barrier since", one_warp(), reads_without_syncwarp, out.data());
}

void shuffles_instead_of_syncwarp(int* out) {
  memory().v[threadIdx.x] = 1;
  const int one = __shfl_sync(kAll, 1, 0);
  out[threadIdx.x] = memory().v[threadIdx.x ^ 1] + one;
}
TEST(a_shuffle_orders_no_memory) {
  Array<int> out(32);
  MUST_REPORT("shared memory", one_warp(), shuffles_instead_of_syncwarp, out.data());
}

void syncs_the_wrong_half(int* out) {
  memory().v[threadIdx.x] = 1;
  __syncthreads();
  memory().v[threadIdx.x] = 2;
  const int one = __shfl_sync(kAll, 1, 0);  // all have written
  __syncwarp(threadIdx.x < 16 ? 0xFFFFu : 0xFFFF0000u);
  out[threadIdx.x] = memory().v[threadIdx.x ^ 16] + one;
}
TEST(a_syncwarp_orders_only_the_lanes_of_its_mask) {
  Array<int> out(32);
  MUST_REPORT("with no barrier since", one_warp(), syncs_the_wrong_half, out.data());
}

void syncs_only_warps(int* out) {
  memory().v[threadIdx.x] = 1;
  __syncthreads();
  memory().v[threadIdx.x] = 2;
  __syncwarp();
  out[threadIdx.x] = memory().v[threadIdx.x ^ 32];
}
TEST(a_syncwarp_orders_no_other_warp) {
  Array<int> out(64);
  MUST_REPORT("with no barrier since", two_warps(), syncs_only_warps, out.data());
}

template <bool kSyncsWarp>
void overwrites_what_all_read(int* out, unsigned writer) {
  if (threadIdx.x == 0) memory().v[0] = 1;
  __syncthreads();
  out[threadIdx.x] = memory().v[0];
  const int one = __shfl_sync(kAll, 1, 0);  // so that the writer is among the last to read
  if constexpr (kSyncsWarp) __syncwarp();
  if (threadIdx.x == writer) memory().v[0] = one;
}
TEST(the_last_reader_does_not_write_while_others_may_read) {
  Array<int> out(64);
  for (const unsigned writer : {0u, 31u, 63u})
    MUST_REPORT("byte 0 of shared memory", two_warps(), overwrites_what_all_read<true>, out.data(), writer);
  for (const unsigned writer : {1u, 30u, 31u})
    MUST_REPORT("byte 0 of shared memory", one_warp(), overwrites_what_all_read<false>, out.data(), writer);
}

void adds_plainly(int* sum) { *sum += 1; }
TEST(a_plain_sum_of_a_block_is_a_race) {
  auto sum = Array<int>::zeros(1, "sum");
  MUST_REPORT("byte 0 of sum", one_warp(), adds_plainly, sum.data());
}

void reads_an_atomic_sum(int* sum, int* out) {
  atomicAdd(sum, 1);
  out[threadIdx.x] = *sum;
}
TEST(an_atomic_sum_is_complete_only_after_a_barrier) {
  auto sum = Array<int>::zeros(1, "sum");
  Array<int> out(32);
  MUST_REPORT("byte 0 of sum", one_warp(), reads_an_atomic_sum, sum.data(), out.data());
}

template <bool kSyncsWarp>
void last_reads_an_atomic_sum(int* sum, int* out, unsigned reader) {
  atomicAdd(sum, 1);
  const int one = __shfl_sync(kAll, 1, 0);
  if constexpr (kSyncsWarp) __syncwarp();
  if (threadIdx.x == reader) out[0] = *sum + one;
}
TEST(an_atomic_sum_is_incomplete_for_who_added_last_too) {
  auto sum = Array<int>::zeros(1, "sum");
  Array<int> out(1);
  for (const unsigned reader : {0u, 31u})
    MUST_REPORT("byte 0 of sum", one_warp(), last_reads_an_atomic_sum<false>, sum.data(), out.data(), reader);
  for (const unsigned reader : {0u, 31u, 32u, 63u})
    MUST_REPORT("byte 0 of sum", two_warps(), last_reads_an_atomic_sum<true>, sum.data(), out.data(), reader);
}

void reads_before_its_atomic(int* out, unsigned reader) {
  unsigned* const amax = reinterpret_cast<unsigned*>(memory().v);
  if (threadIdx.x == 0) amax[0] = 0;
  __syncthreads();
  const unsigned before = threadIdx.x == reader ? amax[0] : 0;
  atomicMax(amax, threadIdx.x);
  out[threadIdx.x] = static_cast<int>(before);
}
TEST(a_plain_read_before_the_readers_own_atomic_is_a_race_with_others) {
  Array<int> out(64);
  for (const unsigned reader : {0u, 31u, 63u})
    MUST_REPORT("byte 0 of shared memory", two_warps(), reads_before_its_atomic, out.data(), reader);
}

void writes_beside_atomics(unsigned* amax, unsigned writer) {
  if (threadIdx.x == writer) *amax = 0;
  atomicMax(amax, threadIdx.x);
}
TEST(a_plain_write_among_atomics_is_a_race) {
  auto amax = Array<unsigned>::zeros(1, "amax");
  for (const unsigned writer : {0u, 5u, 31u})  // the first, one between, the last
    MUST_REPORT("byte 0 of amax", one_warp(), writes_beside_atomics, amax.data(), writer);
}

void one_writes_one_adds(int* sum, unsigned writer) {
  if (threadIdx.x == writer)
    *sum = 1;
  else
    atomicAdd(sum, 1);
}
TEST(a_single_plain_write_and_a_single_atomic_are_a_race) {
  auto sum = Array<int>::zeros(1, "sum");
  for (const unsigned writer : {0u, 1u}) MUST_REPORT("byte 0 of sum", {1, 2}, one_writes_one_adds, sum.data(), writer);
}

// --- barriers that not all reach, or not at the same line

void barriers_at_two_lines(int* out) {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = 1;
}
TEST(all_threads_wait_at_the_same_line) {
  Array<int> out(64);
  MUST_REPORT("waits in __syncthreads at", two_warps(), barriers_at_two_lines, out.data());
}

void returns_early(int* out, unsigned n) {
  if (threadIdx.x >= n) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
TEST(no_thread_returns_before_a_barrier) {
  Array<int> out(64);
  MUST_REPORT(", but thread", two_warps(), returns_early, out.data(), 50u);
}

void barrier_in_a_branch(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = __reduce_max_sync(kAll, 1);
}
TEST(a_barrier_that_a_warp_skips_is_found_at_its_end) {
  Array<int> out(64);
  MUST_REPORT("__syncthreads at", two_warps(), barrier_in_a_branch, out.data());
}

void barrier_against_shuffle(int* out) {
  if (threadIdx.x == 3) __syncthreads();
  out[threadIdx.x] = __shfl_sync(kAll, 1, 0);
}
TEST(lanes_that_wait_for_different_things_are_named) {
  Array<int> out(32);
  MUST_REPORT("nobody can go on", one_warp(), barrier_against_shuffle, out.data());
}

// --- masks

void shuffles_outside_of_the_mask(int* out) { out[threadIdx.x] = __shfl_sync(0xFFFFu, 1, 0); }
TEST(a_lane_is_in_its_own_mask) {
  Array<int> out(32);
  MUST_REPORT("is not in its own mask 0x0000ffff", one_warp(), shuffles_outside_of_the_mask, out.data());
}

void different_masks(int* out) { out[threadIdx.x] = __any_sync(threadIdx.x < 8 ? 0xFFFFu : kAll, 1); }
TEST(lanes_of_a_mask_have_the_same_mask) {
  Array<int> out(32);
  MUST_REPORT("with mask 0x0000ffff", one_warp(), different_masks, out.data());
}

void reads_a_lane_outside(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, 1, 16);
}
TEST(a_shuffle_reads_only_lanes_of_its_mask) {
  Array<int> out(32);
  MUST_REPORT("which is not in the mask", one_warp(), reads_a_lane_outside, out.data());
}

void shuffles_after_a_return(int* out, unsigned n) {
  if (threadIdx.x >= n) return;
  out[threadIdx.x] = __shfl_down_sync(kAll, 1, 1);
}
TEST(lanes_of_a_mask_have_not_returned) {
  Array<int> out(32);
  MUST_REPORT(", but ", one_warp(), shuffles_after_a_return, out.data(), 31u);
}

void shuffles_in_a_branch(int* out) {
  if (threadIdx.x & 1)
    out[threadIdx.x] = __shfl_xor_sync(kAll, 1, 2);
  else
    out[threadIdx.x] = __shfl_xor_sync(kAll, 2, 2);
}
TEST(lanes_of_a_mask_shuffle_at_the_same_line) {
  Array<int> out(32);
  MUST_REPORT("waits for it in __shfl_xor_sync", one_warp(), shuffles_in_a_branch, out.data());
}

void shuffles_in_half_a_warp(int* out, int n) {
  if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = __shfl_xor_sync(kAll, 1, 1);
  __syncthreads();
}
TEST(a_shuffle_that_some_lanes_skip_is_found) {
  Array<int> out(32);
  MUST_REPORT("nobody can go on", one_warp(), shuffles_in_half_a_warp, out.data(), 16);
}

// --- bounds and alignment

void off_by_one(const int* in, int* out, int offset) { out[threadIdx.x] = in[static_cast<int>(threadIdx.x) + offset]; }
TEST(global_arrays_have_bounds) {
  const Array<int> in(std::vector<int>(32), "in");
  Array<int> out(32, "out");
  const Array<int> short_out(31, "short_out");
  MUST_REPORT("reads 4 bytes at byte 128 of in, which has 128", one_warp(), off_by_one, in.data(), out.data(), 1);
  MUST_REPORT("reads 4 bytes at byte -4 of in, which has 128", one_warp(), off_by_one, in.data(), out.data(), -1);
  MUST_REPORT("writes 4 bytes at byte 124 of short_out", one_warp(), off_by_one, in.data(), short_out.data(), 0);
}

TEST(what_is_not_the_devices_is_out_of_bounds) {
  const Array<int> in(std::vector<int>(32), "in");
  static int of_the_program[32];
  int of_the_host[32] = {};
  MUST_REPORT("no memory of the device", one_warp(), off_by_one, in.data(), of_the_program, 0);
  MUST_REPORT("no memory of the device", one_warp(), off_by_one, in.data(), of_the_host, 0);
  MUST_REPORT("no memory of the device", one_warp(), off_by_one, static_cast<const int*>(of_the_host), of_the_host, 0);
}

TEST(read_only_arrays_are_not_written) {
  const Array<int> in(std::vector<int>(32), "in", Access::kReadOnly);
  MUST_REPORT("which is read-only", one_warp(), off_by_one, in.data(), in.data(), 0);
}

void overflows_a_member(int* out) {
  memory().v[threadIdx.x + 225] = 1;  // the last thread's is in `behind`
  out[threadIdx.x] = 1;
}
TEST(arrays_within_the_shared_struct_have_bounds) {
  Array<int> out(32);
  MUST_REPORT("index 256 is out of the bounds of 'int", one_warp(), overflows_a_member, out.data());
}

void beyond_shared_memory() { (&memory().v[0])[threadIdx.x + 300] = 1; }
TEST(shared_memory_ends_where_the_launch_said) {
  MUST_REPORT("of shared memory, which has 1280", one_warp(), beyond_shared_memory);
}

#if !defined(__clang__)  // which does not check copies of whole structs
void reads_vectors(const int* in, int* out) {
  const uint4 v = *reinterpret_cast<const uint4*>(in + threadIdx.x);
  out[threadIdx.x] = static_cast<int>(v.x + v.w);
}
TEST(vectors_are_aligned) {
  const Array<int> in(std::vector<int>(64), "in");
  Array<int> out(32);
  MUST_REPORT("bytes past a multiple of 16", one_warp(), reads_vectors, in.data(), out.data());
}
#endif

void shifts_too_far(int* out, unsigned distance) { out[threadIdx.x] = static_cast<int>(1u << (distance + threadIdx.x)); }
TEST(shifts_are_shorter_than_the_word) {
  Array<int> out(32);
  MUST_REPORT("by 32", one_warp(), shifts_too_far, out.data(), 1u);
}

void copies_structs(const Shared* from, Shared* to, size_t bytes) { std::memcpy(to, from, bytes); }
TEST(calls_of_memcpy_have_bounds) {
  const Array<Shared> from(std::vector<Shared>(1), "from");
  Array<Shared> to(1, "to");
  MUST_REPORT("reads 1281 bytes at byte 0 of from", {1, 1}, copies_structs, from.data(), to.data(), sizeof(Shared) + 1);
}

// --- memory that nobody wrote

void reads_shared_first(int* out) { out[threadIdx.x] = memory().v[threadIdx.x]; }
TEST(shared_memory_is_written_before_it_is_read) {
  Array<int> out(32);
  MUST_REPORT("which nobody wrote", one_warp(), reads_shared_first, out.data());
}

void writes_in_the_first_block(int* out) {
  if (blockIdx.x == 0) memory().v[threadIdx.x] = 1;
  out[blockIdx.x * 32 + threadIdx.x] = memory().v[threadIdx.x];
}
TEST(shared_memory_does_not_outlive_its_block) {
  Array<int> out(64);
  MUST_REPORT("block (1,0,0)", {2, 32, sizeof(Shared)}, writes_in_the_first_block, out.data());
}

TEST(global_memory_is_written_before_it_is_read) {
  const Array<int> in(32, "in");
  Array<int> out(32);
  MUST_REPORT("of in at", one_warp(), off_by_one, in.data(), out.data(), 0);
}

// --- several blocks

void overlapping_blocks(int* out) { out[blockIdx.x * 31 + threadIdx.x] = 1; }
TEST(blocks_do_not_write_the_same_byte) {
  Array<int> out(63, "out");
  MUST_REPORT("but block (0,0,0) wrote it at", {2, 32}, overlapping_blocks, out.data());
}

void reads_the_block_before(int* out) { out[blockIdx.x * 32 + threadIdx.x] = blockIdx.x ? out[blockIdx.x * 32 - 1] : 1; }
TEST(blocks_do_not_read_what_another_writes) {
  Array<int> out(64, "out");
  MUST_REPORT("byte 124 of out", {2, 32}, reads_the_block_before, out.data());
}

void writes_what_all_read(int* scale, int* out) {
  out[blockIdx.x] = *scale;
  if (blockIdx.x == 2) *scale = 1;
}
TEST(blocks_do_not_write_what_another_reads) {
  auto scale = Array<int>::zeros(1, "scale");
  Array<int> out(3);
  MUST_REPORT("but earlier blocks of this launch read it", {3, 1}, writes_what_all_read, scale.data(), out.data());
}

void reads_an_unfinished_sum(int* sum, int* out) {
  atomicAdd(sum, 1);
  __syncthreads();
  if (blockIdx.x == 1 && threadIdx.x == 0) out[0] = *sum;
}
TEST(an_atomic_sum_of_blocks_is_complete_only_in_the_next_launch) {
  auto sum = Array<int>::zeros(1, "sum");
  Array<int> out(2);
  MUST_REPORT("of this launch changed it too", {2, 64}, reads_an_unfinished_sum, sum.data(), out.data());
}

// --- asynchronous copies

template <int kPending, bool kBarrier>
void loads_two_stages(const int* in, int* out) {
  const unsigned i = threadIdx.x;
  copy_async16(memory().v + 4 * i, in + 4 * i);
  copy_async_commit();
  if (i < 16) copy_async16(memory().behind + 4 * i, in + 128 + 4 * i);
  copy_async_commit();
  copy_async_wait<kPending>();
  if constexpr (kBarrier) __syncthreads();
  out[i] = memory().behind[i];
  copy_async_wait<0>();
}
TEST(an_asynchronous_copy_is_waited_for_by_who_started_it_and_then_by_all) {
  const Array<int> in(std::vector<int>(256), "in");
  Array<int> out(32);
  MUST_REPORT("has not been waited for", one_warp(), loads_two_stages<2, true>, in.data(), out.data());
  MUST_REPORT("has not been waited for", one_warp(), loads_two_stages<1, true>, in.data(), out.data());
  MUST_REPORT("shared memory", one_warp(), loads_two_stages<0, false>, in.data(), out.data());
}

void waits_after_the_barrier(const int* in, int* out) {
  if (threadIdx.x == 0) copy_async16(memory().v, in);
  copy_async_commit();
  __syncthreads();
  copy_async_wait<0>();
  const int zero = __shfl_sync(kAll, 0, 0);  // all have waited, but a shuffle orders no memory
  if (threadIdx.x == 1) out[0] = memory().v[0] + zero;
}
TEST(a_barrier_before_the_wait_is_too_early) {
  const Array<int> in(std::vector<int>(4), "in");
  Array<int> out(1);
  MUST_REPORT("with no barrier since", one_warp(), waits_after_the_barrier, in.data(), out.data());
}

void loads_into_a_live_stage(const int* in, int* out) {
  const unsigned i = threadIdx.x;
  for (int step = 0; step < 2; ++step) {
    copy_async16(memory().v + 4 * i, in + 4 * i);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    out[i] = memory().v[127 - i];
  }
}
TEST(a_stage_is_not_loaded_while_others_read_it) {
  const Array<int> in(std::vector<int>(128), "in");
  Array<int> out(32);
  MUST_REPORT("with no barrier since", one_warp(), loads_into_a_live_stage, in.data(), out.data());
}

void writes_where_a_copy_lands(const int* in) {
  copy_async16(memory().v + 4 * threadIdx.x, in + 4 * threadIdx.x);
  memory().v[4 * threadIdx.x + 3] = 1;
  copy_async_commit();
  copy_async_wait<0>();
}
TEST(nothing_is_written_where_a_copy_will_land) {
  const Array<int> in(std::vector<int>(128), "in");
  MUST_REPORT("has not been waited for", one_warp(), writes_where_a_copy_lands, in.data());
}

void leaves_a_copy_behind(const int* in) {
  copy_async16(memory().v + 4 * threadIdx.x, in + 4 * threadIdx.x);
  copy_async_commit();
}
TEST(no_thread_returns_with_copies_in_flight) {
  const Array<int> in(std::vector<int>(128), "in");
  MUST_REPORT("returns before the copy_async", one_warp(), leaves_a_copy_behind, in.data());
}

void copies_misaligned(const int* in, int offset) {
  copy_async16(memory().v + 4 * threadIdx.x, in + 4 * threadIdx.x + offset);
  copy_async_commit();
  copy_async_wait<0>();
}
TEST(asynchronous_copies_are_aligned_and_in_bounds) {
  const Array<int> in(std::vector<int>(128), "in");
  MUST_REPORT("not a multiple of", one_warp(), copies_misaligned, in.data(), 1);
  MUST_REPORT("reads 16 bytes at byte 512 of in", one_warp(), copies_misaligned, in.data(), 4);
}

// --- matrices

void loads_matrices(int rows, int offset, uint32_t* out) {
  for (int i = threadIdx.x; i < rows * 4; i += 32) memory().v[i] = i;
  __syncthreads();
  uint32_t r[4];
  ldmatrix_x4(r, memory().v + threadIdx.x * 4 + offset);
  out[threadIdx.x] = r[0];
}
TEST(rows_of_matrices_are_aligned_and_written) {
  Array<uint32_t> out(32);
  MUST_REPORT("not a multiple of 16", one_warp(), loads_matrices, 32, 2, out.data());
  MUST_REPORT("which nobody wrote", one_warp(), loads_matrices, 31, 0, out.data());
}

void multiplies_in_a_branch(float* out) {
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  if (threadIdx.x < 16) mma_m16n8k16_bf16(d, a, b);
  out[threadIdx.x] = d[0];
}
TEST(the_whole_warp_multiplies) {
  Array<float> out(32);
  cuda_on_cpu::Reports reports;  // its line is the wrapper's
  CHECK_EQ(run(one_warp(), multiplies_in_a_branch, out.data()), cudaErrorLaunchFailure);
  CHECK(reports.messages.at(0).find("waits for it in mma_m16n8k16_bf16") != std::string::npos);
}

// --- the reports themselves

TEST(a_report_names_kernel_block_threads_byte_and_lines) {
  Array<int> out(64, "out");
  cuda_on_cpu::Reports reports;
  run(two_warps(), reads_without_barrier, out.data());
  std::printf("       %s\n", reports.messages.at(0).c_str());
  for (const char* words : {"reads_without_barrier, block (0,0,0), thread (0,0,0): writes byte 0 of shared memory at cuda/",
                            ", but thread (32,0,0) read it at cuda/reports_test.cc:"})
    CHECK(reports.messages[0].find(words) != std::string::npos);
}

TEST(a_launch_after_a_report_is_as_good_as_before) {
  Array<int> out(64, "out");
  cuda_on_cpu::Reports reports;
  run(two_warps(), reads_without_barrier, out.data());
  const Array<int> in(std::vector<int>(64, 3), "in");
  CHECK_EQ(run({1, 64}, off_by_one, in.data(), out.data(), 0), cudaSuccess);
  CHECK_EQ(out[63], 3);
  CHECK_EQ(reports.messages.size(), 1u);
}

TEST(a_report_that_nobody_takes_fails_the_program) {
  Array<int> out(64, "out");
  std::fflush(stdout);
  const pid_t child = fork();
  if (!child) {
    if (!std::freopen("/dev/null", "w", stdout)) _exit(3);
    run(two_warps(), reads_without_barrier, out.data());
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
