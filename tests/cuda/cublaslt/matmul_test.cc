// The GEMMs of xla_ffi/cuda/matmul/matmul.cc, every format on every kind of GPU, through a model of cuBLASLt
// (cublaslt_model.cc): operands, their order, leading dimensions, scale layouts and alpha are right if the results are those
// of float64.
//   JAXLOWPREC_CUBLASLT=<path of the model's library> matmul_test
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "matmul_case.h"

namespace {

const std::pair<Format, Format> kPairs[] = {
    {nvfp4(), nvfp4()},
    {nvfp4(true), nvfp4()},
    {nvfp4(), nvfp4(true)},
    {mx(k4), mx(k5, true)},
    {mx(k5), mx(k4)},
    {mx(k2), mx(k2, true)},
    {mx(k4, true), mx(k2)},
    {mx(k2), mx(k4)},
    {float8_block(k4, false, false), float8_block(k4, false, false)},
    {float8_block(k5, false, false), float8_block(k4, true, false)},
    {float8_block(k4, true, true), float8_block(k5, false, true)},
    {float8_block(k4, false, true), float8_block(k4, true, true)},
    {float8_tensor(k4), float8_tensor(k5)},
    {float8_tensor(k4), float8_tensor(k4)},
    {mx(k2), mx(k2)},
    {line_format(k4), line_format(k4)},
    {line_format(k5), line_format(k4)},
    {line_format(CodeType::kInt8), line_format(CodeType::kInt8)},
};

const Sizes kSizes[] = {{1, 4, 16, 32}, {2, 20, 144, 160}, {1, 132, 272, 288}};

/// In a process of its own with another environment: what prepare_matmul says.
std::string prepared_with(const char* variable, const char* value) {
  int pipes[2];
  if (pipe(pipes)) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    setenv(variable, value, 1);
    const std::string said = cuda::prepare_matmul();
    const ssize_t written = write(pipes[1], said.data(), said.size());
    _exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(pipes[1]);
  std::string said;
  char buffer[512];
  for (ssize_t count; (count = read(pipes[0], buffer, sizeof buffer)) > 0;) said.append(buffer, count);
  close(pipes[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  return said;
}

}  // namespace

// First: the library is found once a process, so these processes are made before this one looks for it.
TEST(a_library_that_is_missing_or_too_old_is_named) {
  CHECK(contains(prepared_with("JAXLOWPREC_CUBLASLT", "/nonexistent.so"), "cuBLASLt was not found (/nonexistent.so"));
  CHECK(contains(prepared_with("JAXLOWPREC_CUBLASLT", "libm.so.6"), "cuBLASLt has no cublasLt"));
  CHECK(contains(prepared_with("CUBLASLT_MODEL_VERSION", "120804"), "cuBLASLt 12.8.4 is loaded, 12.9.0 or newer is needed"));
  CHECK_EQ(prepared_with("CUBLASLT_MODEL_VERSION", "120900"), std::string());
}

TEST(every_format_on_every_gpu) {
  for (const int capability : {80, 89, 90, 100, 120}) {
    set_capability(capability);
    for (const auto& [a, b] : kPairs)
      for (const Sizes& sizes : kSizes)
        for (const ElementType type : {ElementType::kF32, ElementType::kBF16})
          for (const bool accumulate : {false, true}) {
            const check::Given given("capability " + std::to_string(capability) + ", pair " +
                                     std::to_string(&a - &kPairs[0].first) + ", rows " + std::to_string(sizes.rows) +
                                     ", accumulate " + std::to_string(accumulate));
            Case c(a, b, sizes, type, accumulate);
            const std::string problem = c.run();
            const bool possible = a.scaling != Scaling::kFloat32 || a.power_of_two || capability == 90;
            CHECK(possible ? problem.empty() : contains(problem, "not powers of two"));
            if (possible && !problem.empty()) check::fail(__FILE__, __LINE__, problem);
            if (problem.empty()) check_result(c);
          }
  }
}

TEST(scales_in_the_order_of_hoppers_gemm_are_not_laid_out_again) {
  set_capability(90);
  const Format rows = float8_block(k4, false, false), tiles = float8_block(k5, true, false);
  for (const auto& [a, b] : {std::pair(rows, rows), std::pair(rows, tiles), std::pair(tiles, rows)})
    for (const int64_t depth : {96, 288, 512}) {
      Case c(a, b, {2, 20, 144, depth}, ElementType::kF32, false);
      const auto result = [&](int expected_launches) {
        const int before = doubles::layout_calls;
        CHECK_EQ(c.run(), std::string());
        CHECK_EQ(doubles::layout_calls - before, 2 * expected_launches);  // of each batch entry
        return std::vector<uint8_t>(c.result.data, c.result.data + 4 * 2 * 20 * 144);
      };
      const int of_rows = depth > 128 ? 1 + !b.tiles - a.tiles : 0, of_tiles = (a.tiles || b.tiles) && depth != 512;
      const auto expected = result(of_rows + of_tiles);
      check_result(c);
      const auto a_scale = by_columns(c.p.a, 2, 20), b_scale = by_columns(c.p.b, 2, 144);
      const auto lay_out = [](MatmulOperand& o, const std::vector<uint8_t>& scale) {
        if (!o.format.tiles) o.format.column_major = true, o.scale = scale.data();
      };
      lay_out(c.p.a, a_scale), lay_out(c.p.b, b_scale);
      CHECK(result(of_tiles) == expected);
    }
}

TEST(scales_in_the_order_of_another_gpu_are_refused) {
  Format rows = float8_block(k4, false, true);
  rows.column_major = true;
  for (const int capability : {89, 100}) {
    set_capability(capability);
    Case c(rows, float8_block(k4, true, true), {1, 16, 16, 256}, ElementType::kF32, false);
    CHECK(contains(c.run(), "compile the program for this GPU"));
  }
}

constexpr Format int4_in_groups(int32_t group) {
  return {CodeType::kInt4, Scaling::kFloat16, group, false, ScaleRule::kUp, false, 0};
}

TEST(routes) {
  using Route = cuda::MatmulRoute;
  const auto route = [](const Format& a, const Format& b, int64_t rows, int capability) {
    MatmulProblem p{};
    p.a = {a, nullptr, nullptr, nullptr, 256}, p.b = {b, nullptr, nullptr, nullptr, 256};
    p.rows = rows, p.columns = 256;
    return cuda::plan_matmul(p, capability).route;
  };
  CHECK(route(nvfp4(), nvfp4(), 17, 90) == Route::kDecoded);
  CHECK(route(nvfp4(), nvfp4(true), 16, 80) == Route::kSmall);
  CHECK(route(nvfp4(), nvfp4(), 16, 100) == Route::kSmall);
  CHECK(route(nvfp4(), nvfp4(), 17, 100) == Route::kNVFP4);
  CHECK(route(mx(k4), mx(k5), 64, 90) == Route::kDecoded);
  CHECK(route(mx(k4), mx(k5), 64, 120) == Route::kMX);
  for (const Format& other : {mx(k2), mx(k2, true)}) {
    CHECK(route(mx(k2), other, 64, 90) == Route::kRebased);
    CHECK(route(other, mx(k2), 16, 90) == Route::kRebased);
    CHECK(route(mx(k2), other, 66, 90) == Route::kDecoded);  // Python pads them
    CHECK(route(mx(k2), other, 12, 90) == Route::kDecoded);
    for (const int capability : {80, 89}) CHECK(route(mx(k2), other, 64, capability) == Route::kDecoded);
    for (const int capability : {100, 120}) CHECK(route(mx(k2), other, 64, capability) == Route::kWidened);
  }
  CHECK(route(mx(k4), mx(k2), 64, 90) == Route::kDecoded);
  CHECK(route(mx(k4), mx(k2, true), 1, 100) == Route::kWidened);
  CHECK(route(mx(k2), mx(k5), 64, 120) == Route::kWidened);
  CHECK(route(float8_block(k4, false, true), float8_block(k4, true, true), 64, 90) == Route::kBlock128);
  CHECK(route(float8_block(k4, false, true), float8_block(k4, true, true), 64, 100) == Route::kDecoded);
  CHECK(route(float8_block(k4, false, true), float8_block(k4, true, true), 64, 89) == Route::kDecoded);
  CHECK(route(float8_block(k4, false, false), float8_block(k4, true, false), 64, 100) == Route::kNone);
  CHECK(route(float8_tensor(k4), float8_tensor(k4), 64, 89) == Route::kTensor);
  CHECK(route(float8_tensor(k4), float8_tensor(k4), 64, 80) == Route::kDecoded);
  CHECK(route(nvfp4(), nvfp4(), 64, 75) == Route::kNone);
  const Format integers = line_format(CodeType::kInt8);
  for (const int capability : {80, 89, 90, 100, 120}) CHECK(route(integers, integers, 1, capability) == Route::kInt8);
  for (const int capability : {80, 89, 90, 100, 120})
    for (const Format& weight : {mx(k2), mx(k2, true), int4_in_groups(32), int4_in_groups(256)})
      CHECK(route(integers, weight, 64, capability) == Route::kNibbles);
  CHECK(route(line_format(k4), line_format(k4), 64, 80) == Route::kDecoded);
  CHECK(route(line_format(k4), line_format(k4), 64, 89) == Route::kTensor);
  CHECK(route(line_format(k4), line_format(k4), 64, 90) == Route::kLines);
  CHECK(route(line_format(k4), line_format(k4), 64, 100) == Route::kTensor);
}

/// Exact sums and two roundings in a given order: the CPU's bytes.
TEST(products_of_integers_are_the_references_to_the_byte) {
  const Format integers = line_format(CodeType::kInt8);
  for (const int capability : {80, 90, 100}) {
    set_capability(capability);
    for (const Sizes& sizes : {Sizes{1, 1, 16, 32}, {2, 20, 144, 160}, {1, 1, 16, 131072}})
      for (const bool accumulate : {false, true}) {
        if (sizes.depth == 131072 && (capability != 90 || accumulate)) continue;  // the longest that int32 holds
        Case c(integers, integers, sizes, ElementType::kF32, accumulate);
        CHECK_EQ(c.run(), std::string());
        for (int64_t batch = 0; batch < sizes.batch; ++batch) {
          const reference::DecodedOperand a(c.p.a, sizes.rows, batch, sizes.depth),
              b(c.p.b, sizes.columns, batch, sizes.depth);
          for (int64_t m = 0; m < sizes.rows; ++m)
            for (int64_t n = 0; n < sizes.columns; ++n) {
              const int64_t i = (batch * sizes.rows + m) * sizes.columns + n;
              const float sum = reference::scaled_dot(c.p, a, m, b, n);
              const float onto = accumulate ? reference::get(c.accumulate.data, ElementType::kF32, i) : 0;
              CHECK_EQ(reference::get(c.result.data, ElementType::kF32, i), accumulate ? sum + onto : sum);
            }
        }
      }
  }
}

/// The kernel is executed in tests/cuda; this is what it is given, of each batch entry.
TEST(products_of_integers_by_4_bits_are_the_references_to_the_byte) {
  for (const int capability : {80, 90, 100}) {
    set_capability(capability);
    for (const Format& weight : {mx(k2), int4_in_groups(32), int4_in_groups(128)})
      for (const bool accumulate : {false, true}) {
        Case c(line_format(CodeType::kInt8), weight, {3, 5, 48, 256}, ElementType::kF32, accumulate);
        CHECK(contains(c.run(), "do not lie group by group"));
        std::vector<uint8_t> expected(4 * 3 * 5 * 48);
        reference::matmul(c.p, expected.data(), nullptr);
        const auto scales = by_columns(c.p.b, 3, 48);
        c.p.b.format.column_major = true, c.p.b.scale = scales.data();
        CHECK_EQ(c.run(), std::string());
        CHECK(std::equal(expected.begin(), expected.end(), c.result.data));
      }
  }
}

TEST(few_rows_take_the_kernel_that_decodes_in_registers_and_accumulation_the_gemm) {
  set_capability(90);
  for (const bool accumulate : {false, true}) {
    Case c(nvfp4(), nvfp4(), {2, 4, 32, 64}, ElementType::kBF16, accumulate);
    const int before = doubles::small_calls;
    CHECK_EQ(c.run(), std::string());
    CHECK_EQ(doubles::small_calls - before, accumulate ? 0 : 2);
    check_result(c);
  }
}

TEST(fp8_sums_on_ada_and_hopper_keep_to_their_own_bound_and_not_to_numerics_9) {
  for (const int capability : {89, 90}) {
    set_capability(capability);
    for (const auto& [a, b] : kPairs) {
      const bool block128 = a.scaling == Scaling::kFloat32;
      if ((a.scaling != Scaling::kTensor && !block128) || (capability == 89 && block128)) continue;
      const check::Given given("capability " + std::to_string(capability) + ", pair " +
                               std::to_string(&a - &kPairs[0].first));
      Case c(a, b, {1, 64, 64, 160}, ElementType::kF32, false);
      CHECK_EQ(c.run(), std::string());
      check_result(c);
      CHECK(results_beyond(c, contract(c)) > 64 * 64 / 4);
    }
  }
}

TEST(float32_sums_keep_to_numerics_9_on_every_gpu) {
  for (const int capability : {80, 89, 90, 100}) {
    set_capability(capability);
    for (const auto& [a, b] : kPairs) {
      const check::Given given("capability " + std::to_string(capability) + ", pair " +
                               std::to_string(&a - &kPairs[0].first));
      Case c(a, b, {1, 20, 64, 160}, ElementType::kF32, false);
      c.p.float32_sums = true;
      const std::string problem = c.run();
      if (!cuda::decodes_exactly(c.p)) {
        CHECK(contains(problem, "not powers of two"));
        CHECK_EQ(contains(problem, "precision=\"highest\""), capability == 90);
        continue;
      }
      CHECK_EQ(problem, std::string());
      CHECK_EQ(results_beyond(c, contract(c), false), 0);
    }
  }
}

TEST(the_largest_error_of_fp8_sums_is_nearly_reached) {
  set_capability(90);
  Case c(float8_tensor(k4), float8_tensor(k4), {1, 1, 16, 128}, ElementType::kF32, false);
  std::memset(c.a_data.data, 0x57, 128), std::memset(c.b_data.data, 0x38, 16 * 128);  // 15 by 1, just below 2^17 / 2^13
  c.a_data.data[0] = 0x7E;                                                            // 448 by 448
  for (int n = 0; n < 16; ++n) c.b_data.data[128 * n] = 0x7E;
  CHECK_EQ(c.run(), std::string());
  const cuda::SumError error = cuda::sum_error(cuda::MatmulRoute::kTensor, 90, 128);
  CHECK_EQ(results_beyond(c, error.largest, false), 0);
  CHECK(results_beyond(c, error.largest / 2) > 0);
}

TEST(a_sum_is_rounded_to_bfloat16_once) {
  set_capability(100);
  for (const auto& [a, b] : {kPairs[0], kPairs[4], kPairs[13]}) {  // their K may be split: into 128 and 160
    Case c(a, b, {1, 64, 64, 288}, ElementType::kBF16, false);
    CHECK_EQ(c.run(), std::string());
    CHECK_EQ(results_beyond(c, contract(c), false), 0);
  }
}

TEST(fp8_blocks_that_cublaslt_has_no_algorithm_for_are_decoded) {
  const Format rows = float8_block(k4, false, true), tiles = float8_block(k4, true, true);
  for (const bool by_count : {false, true}) {
    set_capability(90);
    doubles::device = by_count ? 91 : 92;  // what is known of other devices does not hold for these
    refuse_blocks_below(128, by_count);
    for (const auto& [a, b] : {std::make_pair(rows, tiles), std::make_pair(tiles, rows)})
      for (const int64_t depth : {32, 64, 96}) {
        Case c(a, b, {2, 4, 16, depth}, ElementType::kBF16, true);
        CHECK_EQ(c.run(), std::string());
        CHECK_EQ(results_beyond(c, contract(c), false), 0);
      }
    Case whole(rows, tiles, {1, 4, 16, 128}, ElementType::kBF16, false);
    CHECK_EQ(whole.run(), std::string());
    check_result(whole);
    Case inexact(float8_block(k4, false, false), float8_block(k4, true, false), {1, 4, 16, 64}, ElementType::kBF16, false);
    CHECK(contains(inexact.run(), "(M 4, N 16, K 64): FP8 blocks whose scales are not powers of two cannot be decoded"));
    refuse_blocks_below(512, by_count);
    Case rebased(mx(k2), mx(k2), {1, 16, 16, 160}, ElementType::kBF16, false);
    CHECK(contains(rebased.run(), "(M 16, N 16, K 160): pass precision=\"highest\""));
    Case large(rows, tiles, {1, 4, 16, 256}, ElementType::kBF16, false);
    CHECK(contains(large.run(), "(M 4, N 16, K 256): pass precision=\"highest\""));
  }
  refuse_blocks_below(0, false);
}

TEST(what_the_result_held_before_does_not_matter_to_fp8_tensors) {
  device_beta_reads(true);  // Case::run puts NaN there
  for (const int capability : {89, 90, 100}) {
    set_capability(capability);
    Case c(float8_tensor(k4), float8_tensor(k5), {2, 20, 144, 160}, ElementType::kBF16, false);
    CHECK_EQ(c.run(), std::string());
    check_result(c);
  }
  device_beta_reads(false);
}

TEST(a_workspace_too_small_is_refused) {
  set_capability(90);
  Case c(nvfp4(), nvfp4(), {1, 64, 64, 64}, ElementType::kBF16, false);
  CHECK(contains(c.run(1), "its workspace has"));
  CHECK(contains(c.run(1), "compute capability 9.0"));
}

TEST(what_cublaslt_refuses_is_passed_on) {
  set_capability(90);
  Case c(float8_tensor(k4), float8_tensor(k4), {1, 16, 17, 64}, ElementType::kBF16, false);  // Python pads N to 16
  CHECK(contains(c.run(), "cuBLASLt has no algorithm for this GEMM"));
  CHECK(contains(refusal(), "m is a multiple of 16 bytes"));
}

TEST(heuristics_are_asked_once_a_problem_and_handles_made_once_a_device) {
  set_capability(90);
  Case c(float8_tensor(k4), float8_tensor(k4), {3, 16, 64, 96}, ElementType::kBF16, false);
  const int asked = heuristics();
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(heuristics() - asked, 1);
  Case other(float8_tensor(k4), float8_tensor(k4), {3, 16, 64, 96}, ElementType::kF32, false);
  CHECK_EQ(other.run(), std::string());
  CHECK_EQ(heuristics() - asked, 2);
  const int made = handles();
  for (const int device : {5, 6, 5, 6, 90}) {
    doubles::device = device;
    CHECK_EQ(cuda::prepare_matmul(), std::string());
    CHECK_EQ(c.run(), std::string());
  }
  CHECK_EQ(handles() - made, 2);
  CHECK_EQ(heuristics() - asked, 4);
}

TEST(algorithms_fit_the_alignment_of_a_batchs_slices) {
  set_capability(90);
  Case c(float8_tensor(k4), float8_tensor(k4), {3, 1, 16, 32}, ElementType::kBF16,
         false);  // 32 bytes of a, 512 of b, 32 of the result
  const int asked = heuristics();
  CHECK_EQ(c.run(), std::string());
  check_result(c);
  CHECK_EQ(heuristics() - asked, 3);  // slices begin at multiples of 256, 32 and 64
}

TEST(another_of_cublaslts_suggestions_may_be_asked_for) {
  set_capability(90);
  Case c(float8_tensor(k4), float8_tensor(k4), {1, 16, 64, 160}, ElementType::kBF16, false);
  for (const char* suggestion : {"2", "0", "1"}) {
    setenv("JAXLOWPREC_GEMM_ALGORITHM", suggestion, 1);
    CHECK_EQ(c.run(), std::string());
    CHECK_EQ(algorithm(), std::atoi(suggestion));
    check_result(c);
  }
  setenv("JAXLOWPREC_GEMM_ALGORITHM", "7", 1);
  CHECK(contains(c.run(), "JAXLOWPREC_GEMM_ALGORITHM is 7, cuBLASLt suggests 3"));
  unsetenv("JAXLOWPREC_GEMM_ALGORITHM");
}

TEST(threads_may_launch_at_once) {
  set_capability(100);
  std::vector<std::thread> threads;
  std::vector<std::string> problems(4);
  std::vector<std::unique_ptr<Case>> cases;
  for (int i = 0; i < 4; ++i)
    cases.push_back(std::make_unique<Case>(mx(k4), mx(k4), Sizes{1, 16, 64, 128}, ElementType::kF32, false));
  std::vector<std::unique_ptr<Memory>> workspaces;
  for (int i = 0; i < 4; ++i) workspaces.push_back(std::make_unique<Memory>(size_t{33} << 20));
  const int asked = heuristics();
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const int64_t bytes = cuda::plan_matmul(cases[i]->p, 100).workspace_bytes();
      problems[i] = cuda::launch(cases[i]->p, {nullptr, workspaces[i]->data, bytes}, nullptr);
    });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 4; ++i) {
    CHECK_EQ(problems[i], std::string());
    check_result(*cases[i]);
  }
  CHECK_EQ(heuristics() - asked, 1);
}
