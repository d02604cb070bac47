// What the intrinsics and the tensor cores compute, against definitions written another way.
#include "../../xla_ffi/cuda/intrinsics.cuh"

#include <cfenv>
#include <cmath>
#include <limits>
#include <random>

#include "../cpp/check.h"
#include "execution/run.h"

using namespace jaxlowprec::cuda;
using cuda_on_cpu::Array;
using cuda_on_cpu::run;

namespace {

constexpr float kSmallest = std::numeric_limits<float>::min();

/// Floats of all sizes, and what is special about some.
std::vector<float> floats(size_t n, int seed) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  for (float& x : values) {
    const uint32_t bits = static_cast<uint32_t>(random());
    x = __uint_as_float(bits % 16 ? bits : bits & 0x80000000u);
    if (!std::isfinite(x) || !std::isnormal(x)) x = bits & 1 ? 1.0f : -0.0f;
  }
  return values;
}

/// f(a, b, c) for each thread's three.
template <class F>
void each(const float* a, const float* b, const float* c, float* out, F f) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = f(a[i], b[i], c[i]);
}
template <class F>
std::vector<float> on_the_device(const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& c,
                                 F f) {
  const Array<float> x(a, "a"), y(b, "b"), z(c, "c");
  Array<float> out(a.size(), "out");
  CHECK_EQ(run({static_cast<unsigned>(a.size() / 64), 64}, each<F>, x.data(), y.data(), z.data(), out.data(), f),
           cudaSuccess);
  return out.values();
}

bool same(float a, float b) { return __float_as_uint(a) == __float_as_uint(b); }

// --- float32

/// a b + c rounded towards zero: one rounding of the exact sum, which two doubles hold.
float exact_toward_zero(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;  // exact
  const double sum = product + c, shadow = sum - product, rest = (product - (sum - shadow)) + (c - shadow);
  float y = static_cast<float>(sum);
  const double error = (sum - y) + rest;  // the sign is right
  if (error != 0 && (error < 0) == (y > 0)) y = std::nextafter(y, 0.0f);
  return y;
}

TEST(multiply_add_is_rounded_once_to_nearest_or_towards_zero) {
  const size_t n = 1 << 14;
  std::mt19937 random(1);
  std::vector<float> a(n), b(n), c(n);
  for (size_t i = 0; i < n; ++i) {  // of similar sizes, so that all bits matter
    a[i] = static_cast<float>(static_cast<int>(random())) * 0x1p-31f;
    b[i] = static_cast<float>(static_cast<int>(random())) * 0x1p-31f;
    c[i] = static_cast<float>(static_cast<int>(random())) * (i % 2 ? 0x1p-31f : 0x1p-50f);
  }
  const auto nearest = on_the_device(a, b, c, [](float x, float y, float z) { return __fmaf_rn(x, y, z); });
  const auto zero = on_the_device(a, b, c, [](float x, float y, float z) { return __fmaf_rz(x, y, z); });
  const auto product = on_the_device(a, b, c, [](float x, float y, float) { return __fmul_rz(x, y); });
  int differ = 0;
  for (size_t i = 0; i < n; ++i) {
    CHECK(same(nearest[i], std::fma(a[i], b[i], c[i])));
    CHECK(same(zero[i], exact_toward_zero(a[i], b[i], c[i])));
    CHECK(same(product[i], exact_toward_zero(a[i], b[i], 0)));
    differ += !same(nearest[i], zero[i]);
  }
  CHECK(differ > 1000);
}

TEST(arithmetic_is_rounded_once_and_flushes_subnormals) {
  const std::vector<float> a = floats(1 << 14, 2), b = floats(1 << 14, 3);
  const auto flushed = [](float x) { return std::fabs(x) < kSmallest ? std::copysign(0.0f, x) : x; };
  const auto quotients = on_the_device(a, b, a, [](float x, float y, float) { return __fdiv_rn(x, y); });
  const auto products = on_the_device(a, b, a, [](float x, float y, float) { return __fmul_rn(x, y); });
  const auto sums = on_the_device(a, b, a, [](float x, float y, float) { return __fadd_rn(x, y); });
  const auto inverses = on_the_device(a, b, a, [](float x, float, float) { return __frcp_rn(x); });
  for (size_t i = 0; i < a.size(); ++i) {
    const auto check = [](float found, float expected) {
      CHECK(same(found, expected) || (found != found && expected != expected));
    };
    check(quotients[i], flushed(a[i] / b[i]));
    check(products[i], flushed(a[i] * b[i]));
    check(sums[i], flushed(a[i] + b[i]));
    check(inverses[i], flushed(1 / a[i]));
  }
  const float subnormal = kSmallest / 4;
  const auto inputs = on_the_device(std::vector<float>(64, subnormal), std::vector<float>(64, 4.0f), std::vector<float>(64),
                                    [](float x, float y, float z) { return __fmaf_rn(x, y, z); });
  CHECK(same(inputs[0], 0.0f));  // not the smallest normal number: the input was zero
  volatile float multiplied_now = subnormal;
  CHECK(multiplied_now * 4 == kSmallest);  // and the host's mode is back
}

void converts(const float* x, int* nearest, int* toward_zero) {
  nearest[threadIdx.x] = __float2int_rn(x[threadIdx.x]), toward_zero[threadIdx.x] = __float2int_rz(x[threadIdx.x]);
}
TEST(conversions_to_integers_saturate) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {0.5f, 1.5f, -2.5f, 2.75f, -2.75f, 3e9f, -3e9f, infinity, -infinity, NAN, 16777217.0f};
  const std::vector<int> nearest = {0, 2, -2, 3, -3, INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN, 0, 16777216};
  const std::vector<int> zero = {0, 1, -2, 2, -2, INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN, 0, 16777216};
  const Array<float> in(x);
  Array<int> a(x.size()), b(x.size());
  CHECK_EQ(run({1, static_cast<unsigned>(x.size())}, converts, in.data(), a.data(), b.data()), cudaSuccess);
  for (size_t i = 0; i < x.size(); ++i) CHECK_EQ(a[i], nearest[i]), CHECK_EQ(b[i], zero[i]);
}

// --- integers

TEST(bits_of_integers) {
  CHECK_EQ(__popc(0xF0F00001u), 9);
  CHECK_EQ(__clz(0), 32);
  CHECK_EQ(__clz(1), 31);
  CHECK_EQ(__ffs(0), 0);
  CHECK_EQ(__ffs(8), 4);
  CHECK_EQ(__brev(0x12345678u), 0x1E6A2C48u);
  CHECK_EQ(__umulhi(0xFFFFFFFFu, 0xFFFFFFFFu), 0xFFFFFFFEu);
  CHECK_EQ(__mulhi(-1, 2), -1);
  CHECK_EQ(__funnelshift_l(0x80000001u, 0x12345678u, 4), 0x23456788u);
  CHECK_EQ(__funnelshift_l(1u, 2u, 32), 2u);
  CHECK_EQ(__funnelshift_r(0x80000001u, 0x12345678u, 4), 0x88000000u);
}

TEST(bytes_are_permuted) {
  CHECK_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x3210), 0x33221100u);
  CHECK_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7531), 0x77553311u);
  CHECK_EQ(__byte_perm(0x0000807Fu, 0xFF000000u, 0x0F98), 0x7FFFFF00u);  // 8 and above: the sign of a byte, replicated
}

TEST(halves_of_words_and_three_operands) {
  CHECK_EQ(__vmaxu2(0x80010001u, 0x00020002u), 0x80010002u);
  CHECK_EQ(__vmaxs2(0x80010001u, 0x00020002u), 0x00020002u);
  CHECK_EQ(__vminu2(0x80010001u, 0x00020002u), 0x00020001u);
  CHECK_EQ(__vadd2(0xFFFF0001u, 0x00010001u), 0x00000002u);
  CHECK_EQ(__vimax3_u16x2(0x00010005u, 0x00030002u, 0xFFFF0001u), 0xFFFF0005u);
  CHECK_EQ(__viaddmax_s16x2(0x0003FFFEu, 0x00028005u, 0x0004FFFFu), 0x0005FFFFu);
  CHECK_EQ(__vimin3_s32(3, -5, 4), -5);
  CHECK_EQ(__vimax3_s32(3, -5, 4), 4);
  CHECK_EQ(__vimax3_u32(3, 0xFFFFFFFBu, 4), 0xFFFFFFFBu);
  CHECK_EQ(min(-1, 2), -1);
  CHECK_EQ(max(-1, 2u), 0xFFFFFFFFu);  // both unsigned, as on the device
  CHECK_EQ(max(1.0f, NAN), 1.0f);
}

// --- tensor cores

uint32_t bf16_pair(float low, float high) { return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u); }

/// Loads both operands from their matrices by the manual's figures, and stores the product the same way.
void multiplies(const float* a, const float* b, float* d) {
  const unsigned group = threadIdx.x / 4, in_group = threadIdx.x % 4;
  const auto a_at = [&](unsigned row, unsigned k) { return bf16_pair(a[row * 16 + k], a[row * 16 + k + 1]); };
  const auto b_at = [&](unsigned k) { return bf16_pair(b[k * 8 + group], b[(k + 1) * 8 + group]); };
  const unsigned k = in_group * 2;
  const uint32_t fragment_a[4] = {a_at(group, k), a_at(group + 8, k), a_at(group, k + 8), a_at(group + 8, k + 8)};
  const uint32_t fragment_b[2] = {b_at(k), b_at(k + 8)};
  float sum[4] = {1, 2, 3, 4};
  mma_m16n8k16_bf16(sum, fragment_a, fragment_b);
  d[group * 8 + k] = sum[0], d[group * 8 + k + 1] = sum[1];
  d[(group + 8) * 8 + k] = sum[2], d[(group + 8) * 8 + k + 1] = sum[3];
}
TEST(products_of_fragments_are_those_of_the_matrices) {
  std::mt19937 random(4);
  std::vector<float> a(16 * 16), b(16 * 8);
  for (auto* matrix : {&a, &b})
    for (float& x : *matrix) x = static_cast<float>(static_cast<int>(random() % 255) - 127) / 64;  // bfloat16 holds these
  const Array<float> x(a), y(b);
  cuda_on_cpu::in_every_order([&] {
    Array<float> d(16 * 8);
    CHECK_EQ(run({1, 32}, multiplies, x.data(), y.data(), d.data()), cudaSuccess);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        double expected = 1 + j % 2 + i / 8 * 2;  // the accumulator
        for (int k = 0; k < 16; ++k) expected += static_cast<double>(a[i * 16 + k]) * b[k * 8 + j];
        CHECK_EQ(d[i * 8 + j], expected);  // exact: multiples of 2^-12 below 2^7
      }
  });
}

TEST(tensor_cores_keep_subnormal_operands) {
  std::vector<float> a(16 * 16, 0x1p-130f), b(16 * 8, 0x1p+10f);
  const Array<float> x(a), y(b);
  Array<float> d(16 * 8);
  const auto product = [](const float* p, const float* q, float* out) {
    float sum[4] = {};
    const uint32_t fragment_a[4] = {bf16_pair(p[0], 0), 0, 0, 0}, fragment_b[2] = {bf16_pair(q[0], 0), 0};
    mma_m16n8k16_bf16(sum, fragment_a, fragment_b);
    out[threadIdx.x] = sum[0];
  };
  void (*kernel)(const float*, const float*, float*) = product;
  CHECK_EQ(run({1, 32}, kernel, x.data(), y.data(), d.data()), cudaSuccess);
  CHECK_EQ(d[0], 4 * 0x1p-120f);
}

/// The same for integers: the manual numbers a lane's elements of A from 0 to 15, of B from 0 to 7.
void multiplies_integers(const int8_t* a, const int8_t* b, int32_t* d) {
  const unsigned group = threadIdx.x / 4, in_group = threadIdx.x % 4;
  uint32_t fragment_a[4] = {}, fragment_b[2] = {};
  for (unsigned i = 0; i < 16; ++i) {
    const unsigned row = i < 4 || (i >= 8 && i < 12) ? group : group + 8, k = in_group * 4 + (i & 3) + (i < 8 ? 0 : 16);
    fragment_a[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(a[row * 32 + k])) << (i % 4 * 8);
  }
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned k = in_group * 4 + (i & 3) + (i < 4 ? 0 : 16);
    fragment_b[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(b[k * 8 + group])) << (i % 4 * 8);
  }
  const int32_t onto[4] = {1, -2, INT32_MAX, INT32_MIN};
  int32_t sum[4];
  mma_m16n8k32_s8(sum, fragment_a, fragment_b, onto);
  for (unsigned i = 0; i < 4; ++i) d[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = sum[i];
}
TEST(products_of_fragments_of_integers_wrap_around) {
  std::mt19937 random(5);
  std::vector<int8_t> a(16 * 32), b(32 * 8);
  for (auto* matrix : {&a, &b})
    for (int8_t& x : *matrix) x = static_cast<int8_t>(random());
  std::fill_n(a.begin(), 32, int8_t{-128});
  const Array<int8_t> x(a), y(b);
  Array<int32_t> d(16 * 8);
  CHECK_EQ(run({1, 32}, multiplies_integers, x.data(), y.data(), d.data()), cudaSuccess);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      int64_t expected = i < 8 ? (j % 2 ? -2 : 1) : (j % 2 ? INT32_MIN : INT32_MAX);
      for (int k = 0; k < 32; ++k) expected += a[i * 32 + k] * b[k * 8 + j];
      CHECK_EQ(d[i * 8 + j], static_cast<int32_t>(static_cast<uint32_t>(expected)));
    }
}

/// A block's second half asks for zeros, wherever it says they come from.
void copies_or_not(const uint4* from, uint4* to) {
  struct Shared {
    uint4 v[64];
  };
  Shared& shared = block_shared<Shared>();
  const bool there = threadIdx.x < 32;
  copy_async16_or_zeros(&shared.v[threadIdx.x], from + (there ? threadIdx.x : 1000 + threadIdx.x), there);
  copy_async_commit();
  copy_async_wait<0>();
  to[threadIdx.x] = shared.v[threadIdx.x];
}
TEST(a_copy_of_nothing_leaves_zeros_and_reads_nothing) {
  const Array<uint4> from(std::vector<uint4>(32, make_uint4(1, 2, 3, 4)), "from", cuda_on_cpu::Access::kReadOnly);
  Array<uint4> to(64);
  CHECK_EQ(run({1, 64, 64 * 16}, copies_or_not, from.data(), to.data()), cudaSuccess);
  for (int i = 0; i < 64; ++i) CHECK_EQ(to[i].w, i < 32 ? 4u : 0u), CHECK_EQ(to[i].x, i < 32 ? 1u : 0u);
  CHECK_EQ(from.traffic().read, uint64_t{512});
}

struct Rows {
  alignas(16) uint16_t v[32][24];  // rows of 48 bytes: not one after another
};
void loads_matrices(uint4* out) {
  Rows& rows = block_shared<Rows>();
  for (int i = 0; i < 8; ++i) rows.v[threadIdx.x][i] = static_cast<uint16_t>(threadIdx.x * 8 + i);
  __syncwarp();
  uint32_t r[4];
  ldmatrix_x4(r, rows.v[threadIdx.x]);
  out[threadIdx.x] = make_uint4(r[0], r[1], r[2], r[3]);
}
TEST(ldmatrix_gives_each_lane_two_elements_of_each_matrix) {
  Array<uint4> out(32);
  CHECK_EQ(run({1, 32, sizeof(Rows)}, loads_matrices, out.data()), cudaSuccess);
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t first = i / 4 * 8 + i % 4 * 2, pair = first | (first + 1) << 16;
    CHECK_EQ(out[i].x, pair);
    CHECK_EQ(out[i].w, pair + 0x00010001u * 3 * 64);
  }
}

}  // namespace
