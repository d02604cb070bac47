// The rules of xla_ffi/numerics that are built on the formats, in their scalar form: against golden values, definitions in
// double precision and the standard library. The formats themselves: formats_test.cc.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "../../xla_ffi/numerics/activations.h"
#include "../../xla_ffi/numerics/hadamard.h"
#include "../../xla_ffi/numerics/nvfp4.h"
#include "../../xla_ffi/numerics/philox.h"
#include "check.h"
#include "formats.h"

namespace jaxlowprec {
namespace {

using L = Lanes<float>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

// --- lanes.h: what counts as zero (numerics.md, Notation and 1)

TEST(scaled_makes_zeros_positive_and_keeps_other_signs) {
  const float subnormal = L::from_bits(kMinNormalBits - 1), tiny = L::from_bits(kMinNormalBits);
  for (const float zero : {0.0f, -0.0f, subnormal, -subnormal}) CHECK_EQ(L::bits(L::scaled(zero, 3.0f)), 0u);
  CHECK_EQ(e2m1_encode(L::scaled(-tiny, 1e-30f)), 8u);
  CHECK_EQ(L::scaled(-1.5f, 2.0f), -3.0f);
}

TEST(flush_removes_exactly_the_subnormals) {
  for (const float sign : {1.0f, -1.0f}) {
    CHECK_EQ(L::bits(L::flush(sign * L::from_bits(kMinNormalBits - 1))), L::bits(sign * 0.0f));
    CHECK_EQ(L::bits(L::flush(sign * L::from_bits(1))), L::bits(sign * 0.0f));
    CHECK_EQ(L::flush(sign * L::from_bits(kMinNormalBits)), sign * L::from_bits(kMinNormalBits));
    CHECK_EQ(L::flush(sign * kInfinity), sign * kInfinity);
  }
  CHECK(std::isnan(L::flush(kNotANumber)));
}

// --- NVFP4 (numerics.md 2)

struct Block {
  uint32_t scale;
  std::array<uint8_t, 8> data;
};

Block quantize_block(const std::array<float, 16>& x, float amax) {
  float block_amax = 0;
  for (const float value : x) block_amax = std::max(block_amax, std::fabs(value));
  const Nvfp4TensorScale tensor = nvfp4_tensor_scale(amax);
  Block block{nvfp4_block_scale(block_amax, tensor.multiplier), {}};
  const float encode = nvfp4_block_encode<float>(block.scale, tensor.decode);
  for (int i = 0; i < 16; ++i)
    block.data[i / 2] |= static_cast<uint8_t>(e2m1_encode(L::scaled(x[i], encode)) << (i % 2 * 4));
  return block;
}

TEST(nvfp4_gives_the_golden_blocks) {
  std::array<float, 16> x;
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(i - 8) * 0.375f;
  const Block first = quantize_block(x, 3);
  CHECK_EQ(first.scale, 0x7Eu);
  CHECK((first.data == std::array<uint8_t, 8>{0xFF, 0xEE, 0xCD, 0xAB, 0x20, 0x43, 0x65, 0x76}));
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(i) / 16;
  const Block second = quantize_block(x, 7);
  CHECK_EQ(second.scale, 0x67u);
  const int codes[16] = {0, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7};
  for (int i = 0; i < 16; ++i) CHECK_EQ((second.data[i / 2] >> (i % 2 * 4)) & 15, codes[i]);
}

/// A quotient or product rounded once to float32: float32 operands leave double precision enough bits to round twice.
float once(double x) { return static_cast<float>(x); }

TEST(nvfp4_tensor_scale_follows_the_rule_over_all_magnitudes) {
  std::vector<float> amaxes = {
      1.0f,       3.0f,     6.0f,    2688.0f, std::ldexp(1.0f, -126), std::ldexp(1.0f, 126), std::ldexp(1.0f, 127),
      kMaxFinite, 3.1e-35f, 3.2e-35f};
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i)
    amaxes.push_back(L::from_bits(kMinNormalBits + random() % (kInfinityBits - kMinNormalBits)));
  for (const float g : amaxes) {
    const float encode = std::min(once(2688.0 / g), std::ldexp(1.0f, 126));
    const Nvfp4TensorScale tensor = nvfp4_tensor_scale(g);
    CHECK(tensor.usable);
    CHECK_EQ(tensor.decode, once(1.0 / encode));
    CHECK_EQ(tensor.multiplier, once(static_cast<double>(encode) * once(1.0 / 6.0)));
    CHECK(tensor.decode >= std::ldexp(1.0f, -126));  // never subnormal, or a processor that flushes would see zero
  }
}

TEST(nvfp4_tensor_of_zeros_or_subnormals_has_unit_scale) {
  for (const float g : {0.0f, -0.0f, 1e-38f, 1e-45f, L::from_bits(kMinNormalBits - 1)}) {
    const Nvfp4TensorScale tensor = nvfp4_tensor_scale(g);
    CHECK(tensor.usable);
    CHECK_EQ(tensor.decode, 1.0f);
    CHECK_EQ(tensor.multiplier, once(1.0 / 6.0));
  }
}

TEST(nvfp4_tensor_whose_amax_is_negative_or_not_finite_is_unusable) {
  for (const float g : {kInfinity, -kInfinity, kNotANumber, L::from_bits(0x7F800001u), -1e-30f, -1.0f, -kMaxFinite})
    CHECK(!nvfp4_tensor_scale(g).usable);
}

TEST(nvfp4_block_encode_follows_the_rule_and_stays_finite) {
  for (int e = -126; e <= 127; ++e)
    for (uint32_t scale = 0; scale <= 0x7E; ++scale) {
      const float decode = nvfp4_tensor_scale(std::ldexp(1.3f, e)).decode;
      const float product = once(e4m3.value(scale) * decode);
      const float encode = nvfp4_block_encode<float>(scale, decode);
      const bool flushed = product < std::ldexp(1.0f, -126);
      CHECK_EQ(encode, flushed ? kMaxFinite : std::min(once(1.0 / product), kMaxFinite));
      CHECK(encode >= std::ldexp(1.0f, -126) && encode <= kMaxFinite);
    }
}

TEST(nvfp4_block_scale_never_becomes_nan_for_a_finite_block) {
  for (const float g : {1e-36f, 1e-10f, 1.0f, 1e10f, kMaxFinite})
    for (const float block : {0.0f, 1e-37f, 1.0f, 1e30f, kMaxFinite}) {
      const float multiplier = nvfp4_tensor_scale(g).multiplier;
      const double product = std::min<double>(once(static_cast<double>(block) * multiplier), kMaxFinite);
      CHECK_EQ(nvfp4_block_scale(block, multiplier), e4m3.nearest(product));
    }
}

TEST(nvfp4_largest_element_gets_the_largest_code_and_scale) {
  for (int e = -113; e <= 127; ++e) {  // below 3.2e-35 the cap of S_enc takes over
    std::array<float, 16> x{};
    x[5] = std::ldexp(-1.7f, e);
    const Block block = quantize_block(x, -x[5]);
    CHECK_EQ(block.scale, 0x7Eu);
    CHECK_EQ(block.data[2], 0xF0);
  }
}

TEST(nvfp4_decode_multiplies_left_to_right_and_flushes) {
  for (uint32_t code = 0; code < 16; ++code)
    for (uint32_t scale = 0; scale <= 0x7E; ++scale)
      for (const float g : {0.0f, std::ldexp(1.0f, -126), 1e-30f, 0.7f, 1.0f, 3.3f, 1e30f, 1.2e35f}) {
        const double relative = (code >= 8 ? -1 : 1) * e2m1.value(code & 7) * e4m3.value(scale);  // exact
        const float scaled = L::flush(once(relative * g));
        const float expected = L::flush(once(static_cast<double>(scaled) * once(1.0 / 2688)));
        CHECK_EQ(L::bits(nvfp4_decode<float>(code, float8_decode<E4M3, float>(scale), g)), L::bits(expected));
      }
}

// --- Hadamard transforms (numerics.md 3)

template <int N>
void is_the_sylvester_matrix() {
  for (int row = 0; row < N; ++row) {
    float v[N] = {};
    v[row] = 1;
    hadamard_butterfly<N>(v);
    for (int i = 0; i < N; ++i) CHECK_EQ(v[i], __builtin_popcount(row & i) % 2 ? -1.0f : 1.0f);
    hadamard_butterfly<N>(v);
    for (int i = 0; i < N; ++i) CHECK_EQ(v[i], i == row ? static_cast<float>(N) : 0.0f);
  }
}

template <int N>
void adds_in_the_order_of_the_strides() {
  std::mt19937 random(N);
  std::normal_distribution<float> normal;
  float v[N], expected[N];
  for (int i = 0; i < N; ++i) v[i] = expected[i] = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 24));
  hadamard_butterfly<N>(v);
  for (int stride = 1; stride < N; stride *= 2)
    for (int i = 0; i < N; ++i)
      if (!(i & stride)) {
        const float a = expected[i], b = expected[i + stride];
        expected[i] = a + b, expected[i + stride] = a - b;
      }
  for (int i = 0; i < N; ++i) CHECK_EQ(v[i], expected[i]);
}

TEST(hadamard_is_the_sylvester_matrix_and_its_own_inverse_times_n) {
  is_the_sylvester_matrix<16>(), is_the_sylvester_matrix<32>(), is_the_sylvester_matrix<64>();
  is_the_sylvester_matrix<128>(), is_the_sylvester_matrix<256>();
}

TEST(hadamard_adds_in_the_order_of_the_strides) {
  adds_in_the_order_of_the_strides<16>(), adds_in_the_order_of_the_strides<32>(), adds_in_the_order_of_the_strides<64>();
  adds_in_the_order_of_the_strides<128>(), adds_in_the_order_of_the_strides<256>();
}

TEST(hadamard_gives_the_golden_rotation) {
  const float expected[16] = {-15.5, -7.5, 7.5, -.5, 7.5, -.5, -15.5, 8.5, 8.5, 16.5, 1.5, 1.5, 1.5, -2.5, 10.5, -17.5};
  const int signs[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  float v[16];
  for (int i = 0; i < 16; ++i) {
    CHECK_EQ((kDefaultSignMask >> i) & 1, signs[i] < 0 ? 1u : 0u);
    v[i] = static_cast<float>((i + 1) * signs[i]);
  }
  hadamard_butterfly<16>(v);
  for (int i = 0; i < 16; ++i) CHECK_EQ(v[i] * 0.25f, expected[i]);
}

// --- Philox (numerics.md 4)

TEST(philox_gives_the_known_answers) {
  const struct {
    uint32_t counter[4], key[2], answer[4];
  } cases[] = {
      // kat_vectors of Random123
      {{0, 0, 0, 0}, {0, 0}, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
      {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
      {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
       {0xA4093822, 0x299F31D0},
       {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
  };
  for (const auto& known : cases) {
    uint32_t counter[4];
    std::copy(known.counter, known.counter + 4, counter);
    philox4x32_10<float>(counter, known.key[0], known.key[1]);
    for (int i = 0; i < 4; ++i) CHECK_EQ(counter[i], known.answer[i]);
  }
}

// --- tanh-GELU (numerics.md 9)

double inner(double x) { return std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x); }

/// Every bfloat16 number in order, from minus to plus the largest.
std::vector<float> all_finite_bf16() {
  std::vector<float> numbers;
  for (uint32_t m = 0x7F7F; m > 0; --m) numbers.push_back(-bf16_number(m));
  for (uint32_t m = 0; m <= 0x7F7F; ++m) numbers.push_back(bf16_number(m));
  return numbers;
}

TEST(exp_rule_is_near_exp_and_cut_off_at_both_ends) {
  for (float z = -87.0f; z <= 88.0f; z += 1.0f / 1024) {
    const double exact = std::exp(static_cast<double>(z));
    CHECK(std::fabs(exp_rule(z) - exact) <= exact * 2.6e-7);
  }
  for (const float z : {-87.001f, -100.0f, -1e30f, -kInfinity}) CHECK_EQ(exp_rule(z), 0.0f);
  for (const float z : {88.001f, 100.0f, 1e30f, kInfinity}) CHECK_EQ(exp_rule(z), kInfinity);
}

TEST(gelu_is_near_its_tanh_form) {
  for (float x = -12.0f; x < 12.0f; x += 1.0f / 4096) {
    const double exact = 0.5 * x * (1 + std::tanh(inner(x)));
    CHECK(std::fabs(gelu_tanh(x) - exact) <= 1.5e-7 * std::max(1.0, std::fabs(static_cast<double>(x))));
  }
}

TEST(gelu_tail_has_small_relative_error_where_1_plus_tanh_would_cancel) {
  for (float x = -10.0f; x < 0.0f; x += 1.0f / 4096) {
    const double exact = x / (1 + std::exp(-2 * inner(x)));
    if (inner(x) > -43) CHECK(std::fabs(gelu_tanh(x) - exact) <= -exact * 1.3e-5);
  }
}

TEST(gelu_falls_to_its_minimum_and_rises_from_there_over_all_bf16) {
  const std::vector<float> numbers = all_finite_bf16();
  for (size_t i = 0; i + 1 < numbers.size(); ++i) {
    const float here = gelu_tanh(numbers[i]), next = gelu_tanh(numbers[i + 1]);
    if (numbers[i + 1] <= -0.76f) CHECK(next <= here);
    if (numbers[i] >= -0.75f) CHECK(next >= here);
  }
}

TEST(gelu_is_the_identity_far_right_and_zero_far_left) {
  for (const float x : all_finite_bf16()) {
    if (x >= 6.0f) CHECK_EQ(gelu_tanh(x), x);
    if (x <= -11.0f) CHECK_EQ(gelu_tanh(x), 0.0f);
  }
}

double gelu_gradient(double x) {
  const double s = 1 / (1 + std::exp(-2 * inner(x))), rest = 1 / (1 + std::exp(2 * inner(x)));  // 1 - s would cancel
  return s + x * s * rest * 2 * std::sqrt(2 / 3.14159265358979323846) * (1 + 3 * 0.044715 * x * x);
}

TEST(gelu_gradient_is_within_four_units_in_the_last_place_of_one) {
  for (float x = -12.0f; x < 12.0f; x += 1.0f / 16384) {
    const double exact = gelu_gradient(x);
    CHECK(std::fabs(gelu_tanh_gradient(x) - exact) <= std::ldexp(4 * std::max(1.0, std::fabs(exact)), -24));
  }
}

TEST(gelu_gradient_tail_has_small_relative_error) {
  for (float x = -10.0f; x < -1.0f; x += 1.0f / 4096)
    CHECK(std::fabs(gelu_tanh_gradient(x) - gelu_gradient(x)) <= std::fabs(gelu_gradient(x)) * 1.3e-5);
}

TEST(gelu_gradient_is_one_far_right_and_zero_far_left) {
  for (const float x : all_finite_bf16()) {
    if (x >= 6.0f) CHECK_EQ(gelu_tanh_gradient(x), 1.0f);
    if (x <= -10.01f) CHECK_EQ(L::bits(gelu_tanh_gradient(x)), 0u);
  }
  CHECK_EQ(gelu_tanh_gradient(kInfinity), 1.0f);
  CHECK_EQ(gelu_tanh_gradient(-kInfinity), 0.0f);
  CHECK_EQ(gelu_tanh_gradient(0.0f), 0.5f);
  CHECK(std::isnan(gelu_tanh_gradient(kNotANumber)));
}

TEST(gelu_never_makes_a_wrong_number_of_infinity_or_nan) {
  CHECK_EQ(gelu_tanh(kInfinity), kInfinity);
  CHECK(std::isnan(gelu_tanh(kNotANumber)));
  CHECK(std::isnan(gelu_tanh(-kInfinity)) || gelu_tanh(-kInfinity) == 0.0f);
}

}  // namespace
}  // namespace jaxlowprec
