// Products on Hopper of which MXFP4 is re-based to FP8 with scales of 128, by MXFP4 and by FP8 blocks, through the model of
// cuBLASLt; and those by FP8 blocks on other GPUs.
#include "matmul_case.h"

namespace {

constexpr Format kPowersOfTwo = float8_block(k4, false, true), kAnyScales = float8_block(k5, false, false);

/// Scales of MXFP4 are random bytes, of each operand so many from a least one on.
struct RebasedCase : Case {
  RebasedCase(const Format& a, const Format& b, Sizes sizes, int a_least, int b_least, int bytes)
      : Case(a, b, sizes, ElementType::kF32, false) {
    set_capability(90);
    std::mt19937 random(static_cast<uint32_t>(sizes.depth));
    const auto fill = [&](const Memory& memory, const Format& f, int64_t rows, int least) {
      for (int64_t i = 0; i < sizes.batch * f.scales(rows, sizes.depth); ++i)
        memory.data[i] = static_cast<uint8_t>(least + random() % bytes);
    };
    if (a.packed()) fill(a_scale, a, sizes.rows, a_least);
    fill(b_scale, b, sizes.columns, b_least);
    CHECK(route_of(*this) == cuda::MatmulRoute::kRebased);
  }
};

}  // namespace

TEST(rebased_operands_are_the_decoded_ones_where_they_fit) {
  for (const Format& b : {mx(k2), mx(k2, true)}) {
    RebasedCase c(mx(k2), b, {1, 160, 48, 160}, 107, 120, 15);
    std::memset(c.a_data.data, 0, 160 * 80);
    for (int64_t i = 0; i < 160; ++i) c.a_data.data[i * 80 + i / 2] = static_cast<uint8_t>(i % 2 ? 0xD0 : 0x03);  // -3, 1.5
    CHECK_EQ(c.run(), std::string());
    const std::vector<uint8_t> rebased(c.result.data, c.result.data + 4 * 160 * 48);
    c.p.float32_sums = true;
    CHECK(route_of(c) == cuda::MatmulRoute::kDecoded);
    CHECK_EQ(c.run(), std::string());
    CHECK_EQ(std::memcmp(rebased.data(), c.result.data, rebased.size()), 0);
  }
}

TEST(rebased_products_keep_to_their_bound) {
  for (const Format& b : {mx(k2), mx(k2, true)})
    for (const Sizes sizes : {Sizes{1, 20, 16, 32}, {2, 20, 48, 416}, {1, 132, 64, 1024}}) {
      for (const auto& [a_least, b_least, bytes] : {std::tuple{120, 125, 15}, {107, 107, 41}, {1, 200, 41}, {213, 1, 41}}) {
        const check::Given given("K " + std::to_string(sizes.depth) + ", scales from " + std::to_string(a_least));
        RebasedCase c(mx(k2), b, sizes, a_least, b_least, bytes);
        CHECK_EQ(c.run(), std::string());
        check_result(c);
        if (sizes.depth % 128 != 0 || b_least > 150) continue;  // beyond, float32 does not hold the sums
        RebasedCase by_blocks(kAnyScales, b, sizes, 0, b_least, bytes);
        CHECK_EQ(by_blocks.run(), std::string());
        check_result(by_blocks);
      }
    }
}

TEST(what_rebasing_loses_is_in_the_bound) {
  RebasedCase c(mx(k2), mx(k2), {1, 16, 16, 128}, 127, 127, 1);
  std::memset(c.a_data.data, 0x22, 16 * 64), std::memset(c.b_data.data, 0x22, 16 * 64);  // 1
  for (int64_t i = 0; i < 16; ++i) {
    c.a_scale.data[4 * i] = 147, c.a_scale.data[4 * i + 1] = 127 - 5;  // 2^25 apart
    std::memset(c.b_data.data + 64 * i, 0, 16);                        // what the large block of a meets
  }
  CHECK_EQ(c.run(), std::string());
  check_result(c);
  c.p.float32_sums = true;  // by the bound without what elements lose
  const double error = cuda::sum_error(cuda::MatmulRoute::kRebased, 90, 128).expected;
  CHECK_EQ(results_beyond(c, error), 16 * 16);
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(results_beyond(c, contract(c), false), 0);
}

TEST(a_scale_that_is_nan_makes_its_rows_products_nan) {
  RebasedCase c(mx(k2), mx(k2), {1, 20, 16, 160}, 120, 120, 6);
  c.a_scale.data[3 * 5 + 4] = 255, c.b_scale.data[7 * 5 + 1] = 255;  // of rows 3 and 7
  for (const bool float32_sums : {false, true}) {
    c.p.float32_sums = float32_sums;
    CHECK_EQ(c.run(), std::string());
    for (int64_t i = 0; i < 20 * 16; ++i)
      CHECK_EQ(std::isnan(reference::get(c.result.data, ElementType::kF32, i)), i / 16 == 3 || i % 16 == 7);
  }
}

TEST(fp8_blocks_by_mxfp4_on_every_gpu) {
  using Route = cuda::MatmulRoute;
  for (const int capability : {80, 89, 90, 100, 120}) {
    set_capability(capability);
    for (const Format& a : {kPowersOfTwo, kAnyScales})
      for (const Format& b : {mx(k2), mx(k2, true)})
        for (const Sizes& sizes : {Sizes{1, 16, 16, 128}, {2, 20, 144, 256}, {2, 20, 48, 160}, {1, 12, 32, 512}})
          for (const bool accumulate : {false, true}) {
            const check::Given given("capability " + std::to_string(capability) + ", rows " + std::to_string(sizes.rows) +
                                     ", accumulate " + std::to_string(accumulate));
            Case c(a, b, sizes, accumulate ? ElementType::kBF16 : ElementType::kF32, accumulate);
            const bool rebased = capability == 90 && sizes.rows >= 16 && sizes.depth % 128 == 0;  // Python pads the others
            CHECK(route_of(c) == (rebased ? Route::kRebased : a.power_of_two ? Route::kDecoded : Route::kNone));
            const std::string problem = c.run();
            if (route_of(c) == Route::kNone) {
              CHECK(contains(problem, "not powers of two"));
              continue;
            }
            CHECK_EQ(problem, std::string());
            check_result(c);
          }
  }
}

TEST(fp8_blocks_by_mxfp4_keep_the_scales_that_lie_in_hoppers_order) {
  set_capability(90);
  Case c(kAnyScales, mx(k2), {2, 20, 144, 512}, ElementType::kF32, false);
  const int before = doubles::layout_calls;
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(doubles::layout_calls - before, 2);  // a's of each batch entry
  const std::vector<uint8_t> expected(c.result.data, c.result.data + 4 * 2 * 20 * 144);
  const auto scale = by_columns(c.p.a, 2, 20);
  c.p.a.format.column_major = true, c.p.a.scale = scale.data();
  CHECK_EQ(c.run(), std::string());
  CHECK_EQ(doubles::layout_calls - before, 2);
  CHECK_EQ(std::memcmp(c.result.data, expected.data(), expected.size()), 0);
}

TEST(float32_sums_of_fp8_blocks_by_mxfp4_are_of_decoded_operands) {
  set_capability(90);
  for (const Format& a : {kPowersOfTwo, kAnyScales}) {
    Case c(a, mx(k2), {1, 20, 64, 256}, ElementType::kF32, false);
    c.p.float32_sums = true;
    const std::string problem = c.run();
    CHECK_EQ(contains(problem, "precision=\"highest\""), !a.power_of_two);
    if (a.power_of_two) CHECK_EQ(results_beyond(c, contract(c), false), 0);
  }
}

TEST(a_scale_of_fp8_blocks_or_of_their_weight_that_is_nan_poisons_its_row) {
  RebasedCase c(kAnyScales, mx(k2), {1, 20, 16, 256}, 0, 120, 6);
  reinterpret_cast<float*>(c.a_scale.data)[3 * 2 + 1] = NAN, c.b_scale.data[7 * 8 + 1] = 255;  // of rows 3 and 7
  CHECK_EQ(c.run(), std::string());
  for (int64_t i = 0; i < 20 * 16; ++i)
    CHECK_EQ(std::isnan(reference::get(c.result.data, ElementType::kF32, i)), i / 16 == 3 || i % 16 == 7);
}
