// cuBLASLt's algorithms are timed before the first launch of a GEMM, where JAXLOWPREC_GEMM_ALGORITHM is "timed": through a
// model of cuBLASLt that says how long each takes.
//   JAXLOWPREC_CUBLASLT=<path of the model's library> timing_test
#include "../../../xla_ffi/cuda/matmul/cublaslt.h"
#include "matmul_case.h"

namespace {

/// In this process nothing is known of GEMMs on a device of that kind yet.
void use_another_device(int capability) {
  static int device = 1000;
  set_capability(capability);
  doubles::device = ++device;
}

void take(const char* which) { setenv("JAXLOWPREC_GEMM_ALGORITHM", which, 1); }

void set_all_milliseconds(float first, float second, float third) {
  doubles::milliseconds = model<float (*)()>("cublaslt_model_milliseconds");
  set_milliseconds(0, first), set_milliseconds(1, second), set_milliseconds(2, third);
}

/// Memory that timing asks for, aligned as badly as XLA's may be, with bytes behind it that nobody writes.
struct Asked {
  static constexpr size_t kGuard = 64;
  std::vector<std::vector<uint8_t>> all;

  void* operator()(int64_t bytes) {
    all.emplace_back(bytes + 16 + kGuard, 0xAB);
    const auto start = reinterpret_cast<uintptr_t>(all.back().data());
    return all.back().data() + (16 - start % 16);
  }
  bool guards_hold() const {
    for (const auto& memory : all)
      for (size_t i = memory.size() - kGuard; i < memory.size(); ++i)
        if (memory[i] != 0xAB) return false;
    return true;
  }
};

std::string time_once(Case& c, Asked& asked) {
  const cuda::MatmulResources r = c.resources();
  std::memset(r.workspace, 0, r.workspace_bytes);
  std::memset(c.result.data, 0x5A, 4 * c.sizes.batch * c.sizes.rows * c.sizes.columns);
  const std::string problem = cuda::time_matmul(c.p, r, [&](int64_t bytes) { return asked(bytes); }, nullptr);
  int64_t written = 0;
  for (int64_t i = 0; i < r.workspace_bytes; ++i) written += r.workspace[i] != 0;
  for (int64_t i = 0; i < 4 * c.sizes.batch * c.sizes.rows * c.sizes.columns; ++i) written += c.result.data[i] != 0x5A;
  CHECK_EQ(written, 0);
  CHECK(asked.guards_hold());
  return problem;
}

struct Kind {
  Format a, b;
  int capability;
};

const Kind kKinds[] = {{nvfp4(), nvfp4(), 90},
                       {nvfp4(), nvfp4(true), 100},
                       {mx(k4), mx(k4), 90},
                       {mx(k4), mx(k4), 100},
                       {float8_block(k4, false, false), float8_block(k4, true, false), 90},
                       {float8_tensor(k4), float8_tensor(k5), 90},
                       {float8_tensor(k4), float8_tensor(k4), 80}};

}  // namespace

TEST(the_fastest_is_taken_on_every_route) {
  take("timed");
  CHECK(cuda::times_algorithms());
  for (const Kind& kind : kKinds)
    for (int fastest = 0; fastest < 3; ++fastest)
      for (const bool accumulate : {false, true}) {
        const check::Given given("kind " + std::to_string(&kind - kKinds) + ", fastest " + std::to_string(fastest) +
                                 ", accumulate " + std::to_string(accumulate));
        use_another_device(kind.capability);
        set_all_milliseconds(2, 2, 2), set_milliseconds(fastest, 1);
        Case c(kind.a, kind.b, {1, 20, 32, 288}, ElementType::kBF16, accumulate);
        Asked asked;
        CHECK_EQ(time_once(c, asked), std::string());
        CHECK_EQ(asked.all.size(), 1u);
        CHECK_EQ(c.run(), std::string());
        CHECK_EQ(algorithm(), fastest);
        check_result(c);
      }
}

TEST(a_problem_is_timed_once) {
  take("timed");
  use_another_device(90);
  set_all_milliseconds(3, 1, 2);
  Case c(float8_tensor(k4), float8_tensor(k4), {3, 1, 16, 32}, ElementType::kBF16, false);  // slices of three alignments
  Asked asked;
  CHECK_EQ(time_once(c, asked), std::string());
  CHECK_EQ(asked.all.size(), 1u);
  const float before = doubles::milliseconds();
  set_all_milliseconds(1, 3, 2);
  CHECK_EQ(time_once(c, asked), std::string());
  CHECK_EQ(asked.all.size(), 1u);
  CHECK_EQ(doubles::milliseconds(), before);
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(algorithm(), 1);
  check_result(c);
}

TEST(a_later_suggestion_has_to_be_clearly_faster) {
  take("timed");
  use_another_device(90);
  set_all_milliseconds(100, 99, 98.5f);
  Case c(mx(k4), mx(k4), {1, 16, 64, 160}, ElementType::kBF16, false);
  Asked asked;
  CHECK_EQ(time_once(c, asked), std::string());
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(algorithm(), 0);
}

TEST(fp8_blocks_without_an_algorithm_are_timed_decoded) {
  take("timed");
  use_another_device(90);
  set_all_milliseconds(2, 2, 1);
  refuse_blocks_below(128, true);
  Case c(float8_block(k4, false, true), float8_block(k4, true, true), {1, 16, 32, 64}, ElementType::kBF16, false);
  Asked asked;
  CHECK_EQ(time_once(c, asked), std::string());
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(algorithm(), 2);
  refuse_blocks_below(0, false);
}

TEST(a_launch_before_its_timing_is_refused) {
  take("timed");
  use_another_device(90);
  Case c(mx(k4), mx(k4), {1, 16, 64, 160}, ElementType::kBF16, false);
  CHECK(contains(c.run(), "JAXLOWPREC_GEMM_ALGORITHM=timed must be set before jaxlowprec's first operation"));
}

TEST(too_little_memory_to_time_in_is_said) {
  take("timed");
  use_another_device(90);
  Case c(mx(k4), mx(k4), {1, 16, 64, 160}, ElementType::kBF16, false);
  const std::string problem = cuda::time_matmul(c.p, c.resources(), [](int64_t) { return nullptr; }, nullptr);
  CHECK(contains(problem, "bytes are left to time its algorithms in: free memory, or unset JAXLOWPREC_GEMM_ALGORITHM"));
}

TEST(an_index_or_nothing_times_nothing) {
  for (const char* which : {"", "0", "2"}) {
    take(which);
    CHECK(!cuda::times_algorithms());
    use_another_device(90);
    set_all_milliseconds(2, 1, 3);
    Case c(mx(k4), mx(k4), {1, 16, 64, 160}, ElementType::kBF16, false);
    Asked asked;
    CHECK_EQ(time_once(c, asked), std::string());
    CHECK(asked.all.empty());
    CHECK_EQ(c.run(), std::string());
    CHECK_EQ(algorithm(), std::atoi(which));
  }
}

TEST(what_is_no_algorithm_is_named) {
  use_another_device(90);
  Case c(mx(k4), mx(k4), {1, 16, 64, 160}, ElementType::kBF16, false);
  for (const char* which : {"fastest", "-1", "1x"}) {
    take(which);
    CHECK(contains(c.run(), "needs the index of one of cuBLASLt's suggestions, or timed"));
  }
}
