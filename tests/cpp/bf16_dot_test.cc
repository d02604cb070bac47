// What a processor's dot product of bfloat16 is asked before GEMMs use it, put to dot products that are right and to ones
// that are not: by an order, a rounding or a flush.
#include <cmath>

#include "../../xla_ffi/cpu/matmul/bf16_dot_check.h"
#include "check.h"

namespace jaxlowprec {
namespace {

using portable::F32;
using portable::kLanes;
using portable::U32;

/// Of `dot(x, y, sum)` for one lane, x and y being two numbers each, the upper half's first.
template <class Dot>
bool accepted(Dot dot) {
  return portable::dot_is_two_fused_multiply_adds([&](U32 a, U32 b, F32 sums) {
    for (int i = 0; i < kLanes; ++i) {
      const float x[2] = {Lanes<float>::from_bits(a[i] & 0xFFFF0000u), Lanes<float>::from_bits(a[i] << 16)};
      const float y[2] = {Lanes<float>::from_bits(b[i] & 0xFFFF0000u), Lanes<float>::from_bits(b[i] << 16)};
      sums[i] = dot(x, y, sums[i]);
    }
    return sums;
  });
}

/// Both products in turn, each sum rounded by `round(double)`: to float64 every sum is exact, but for one of numbers so far
/// apart that the rest only has to be seen. The check has subnormals flushed, so conversions to float32 do that.
template <class Round>
bool accepted_with(Round round) {
  return accepted([&](const float* x, const float* y, float sum) {
    const double first = round(static_cast<double>(x[0]) * y[0] + sum);
    return static_cast<float>(round(static_cast<double>(x[1]) * y[1] + first));
  });
}

double nearest(double x) { return static_cast<float>(x); }

double towards_zero(double x) {
  const float y = static_cast<float>(x);
  return std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafter(y, 0.0f) : y;
}

double to_odd(double x) {
  const float y = static_cast<float>(towards_zero(x));
  return y == x ? y : Lanes<float>::from_bits(Lanes<float>::bits(y) | 1u);
}

constexpr double kLeastNormal = 0x1p-126;

TEST(the_dot_product_that_gemms_count_on_is_accepted) {
  CHECK(accepted([](const float* x, const float* y, float sum) { return std::fma(x[1], y[1], std::fma(x[0], y[0], sum)); }));
  CHECK(accepted_with(nearest));
}

TEST(a_dot_product_in_another_order_is_refused) {
  CHECK(
      !accepted([](const float* x, const float* y, float sum) { return std::fma(x[0], y[0], std::fma(x[1], y[1], sum)); }));
  CHECK(!accepted([](const float* x, const float* y, float sum) { return sum + std::fma(x[0], y[0], x[1] * y[1]); }));
}

TEST(a_dot_product_that_rounds_once_is_refused) {
  CHECK(!accepted([](const float* x, const float* y, float sum) {
    return static_cast<float>(static_cast<double>(x[0]) * y[0] + sum + static_cast<double>(x[1]) * y[1]);
  }));
}

TEST(a_dot_product_that_does_not_round_to_nearest_even_is_refused) {
  CHECK(!accepted_with(to_odd));
  CHECK(!accepted_with(towards_zero));
  CHECK(!accepted_with([](double x) {  // ties away from zero
    const double down = towards_zero(x), up = std::nextafter(static_cast<float>(down), std::copysign(INFINITY, x));
    return std::fabs(x) < kLeastNormal || std::isinf(up) || std::fabs(x - down) < std::fabs(up - x) ? nearest(x) : up;
  }));
}

TEST(a_dot_product_that_keeps_a_subnormal_sum_is_refused) {
  CHECK(!accepted_with([](double x) { return std::fabs(x) < kLeastNormal ? x : nearest(x); }));
}

TEST(a_dot_product_that_flushes_before_it_rounds_is_refused) {
  CHECK(!accepted_with([](double x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0, x) : nearest(x); }));
}

}  // namespace
}  // namespace jaxlowprec
