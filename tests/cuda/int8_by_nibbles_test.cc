// The GEMM of 8-bit integers by rows with a 4-bit weight, executed on a CPU: the reference's bytes.
#include "../../xla_ffi/cuda/matmul/int8_by_nibbles.h"

#include "../cpp/check.h"
#include "../cpp/matmul_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

constexpr Format int4(int block, ElementType scale_type = ElementType::kBF16) {
  return {CodeType::kInt4, Scaling::kFloat16, block, false, ScaleRule::kUp, false, 0, scale_type};
}
constexpr Format kMxfp4 = mx(CodeType::kE2M1), kInt8Rows = line_format(CodeType::kInt8);

struct Case {
  Format b;
  int64_t rows, columns, depth;
  ElementType type = ElementType::kF32;
  bool accumulates = false, largest = false;  // all codes the largest of their kind
};

/// Any bytes as codes; scales of every kind, of which float32 holds the products, and some that it does not.
struct Operands {
  std::vector<uint8_t> a, a_scale, b, b_scale, onto;
  MatmulProblem p{};

  Operands(const Case& c, uint32_t seed)
      : a(any_bytes(c.rows * c.depth, seed)),
        a_scale(any_elements(ElementType::kF32, c.rows, seed + 1)),
        b(any_bytes(c.columns * c.b.row_bytes(c.depth), seed + 2)),
        onto(any_elements(c.type, c.rows * c.columns, seed + 4)) {
    const int64_t scales = c.b.scales(c.columns, c.depth);
    b_scale =
        c.b.scaling == Scaling::kE8M0 ? any_bytes(scales, seed + 3) : any_elements(c.b.scale_type, scales, seed + 3, false);
    std::mt19937 random(seed + 5);
    if (c.b.scaling == Scaling::kE8M0)  // NaN and products beyond float32 in a few columns only
      for (int64_t i = 0; i < scales; ++i)
        if (i / c.b.blocks(c.depth) % 4)
          b_scale[i] = static_cast<uint8_t>(random() % 8 ? 120 + random() % 16 : random() % 4);
    if (c.largest)
      std::fill(a.begin(), a.end(), 0x80),
          std::fill(b.begin(), b.end(), c.b.packed() && c.b.code == CodeType::kInt4 ? 0 : 0xFF);
    p.a = {kInt8Rows, a.data(), a_scale.data(), nullptr, c.depth};
    p.b = {c.b, b.data(), b_scale.data(), nullptr, c.b.blocks(c.depth) * c.b.block};
    p.batch = 1, p.rows = c.rows, p.columns = c.columns, p.type = p.accumulate_type = c.type;
    if (c.accumulates) p.accumulate = onto.data();
  }

  std::vector<uint8_t> reference() const {
    std::vector<uint8_t> result(p.rows * p.columns * reference::element_size(p.type));
    reference::matmul(p, result.data(), nullptr);
    return result;
  }

  /// The weight's scales as the kernel reads them: those of a group together.
  std::vector<uint8_t> scales_by_groups() const {
    const int64_t groups = p.b.format.blocks(p.b.columns), size = p.b.format.scale_bytes();
    std::vector<uint8_t> to(b_scale.size());
    for (int64_t i = 0; i < p.columns * groups; ++i)
      std::memcpy(&to[(i % groups * p.columns + i / groups) * size], &b_scale[i * size], size);
    return to;
  }
};

struct Device {
  Array<uint8_t> a, a_scale, b, b_scale, onto;

  explicit Device(const Operands& o)
      : a(o.a, "a", Access::kReadOnly),
        a_scale(o.a_scale, "a scale", Access::kReadOnly),
        b(o.b, "b", Access::kReadOnly),
        b_scale(o.scales_by_groups(), "b scale", Access::kReadOnly),
        onto(o.onto, "onto", Access::kReadOnly) {}

  cuda::Int8ByNibblesProblem problem(const Case& c, void* result) const {
    return {a.data(), reinterpret_cast<const float*>(a_scale.data()), c.b,    b.data(), b_scale.data(), c.rows, c.columns,
            c.depth,  c.accumulates ? onto.data() : nullptr,          result, c.type};
  }
  std::vector<uint8_t> run(const Case& c) const {
    Array<uint8_t> result(c.rows * c.columns * reference::element_size(c.type), "result");
    CHECK_EQ(cuda::launch(problem(c, result.data()), nullptr), cudaSuccess);
    CHECK_EQ(result.unwritten(), size_t{0});
    return result.values();
  }
};

void check_case(const Case& c, uint32_t seed, bool every_order = false) {
  const check::Given given((c.b.code == CodeType::kInt4 ? "Int4 " : "MXFP4 ") + name(c.b.scale_type) + ", groups of " +
                           std::to_string(c.b.block) + ", " + std::to_string(c.rows) + "x" + std::to_string(c.columns) +
                           "x" + std::to_string(c.depth));
  const Operands operands(c, seed);
  const Device device(operands);
  const auto expected = operands.reference();
  const auto check = [&] {
    CHECK_EQ(first_difference(device.run(c).data(), expected.data(), c.type, c.rows * c.columns), -1);
  };
  every_order ? cuda_on_cpu::in_every_order(check) : check();
}

std::vector<Format> weights() {
  std::vector<Format> all = {kMxfp4};
  for (const int block : {32, 64, 128, 256})
    for (const ElementType type : {ElementType::kBF16, ElementType::kF16}) all.push_back(int4(block, type));
  return all;
}

TEST(few_rows_have_the_references_bytes) {
  uint32_t seed = 0;
  for (const Format& b : weights())
    for (const auto& [rows, columns, depth] : {std::tuple{1, 16, 32}, {16, 80, 160}, {3, 64, 1184}, {7, 48, 640}})
      for (const bool accumulates : {false, true})
        check_case({b, rows, columns, depth, accumulates ? ElementType::kBF16 : ElementType::kF32, accumulates}, ++seed);
}

TEST(tiles_of_64_rows_have_the_references_bytes) {
  uint32_t seed = 100;
  for (const Format& b : weights()) {
    check_case({b, 17, 16, 96}, ++seed);
    check_case({b, 70, 144, 416, ElementType::kBF16, true}, ++seed);
  }
}

/// So many columns that the blocks would be enough for a GPU: few of them are executed.
TEST(tiles_of_128_rows_have_the_references_bytes) {
  uint32_t seed = 200;
  for (const Format& b : weights()) {
    const Case c{b, 130, 8208, 288};  // 2 x 65 tiles, of which the last ones are 2 rows or 16 columns
    const Operands operands(c, ++seed);
    const Device device(operands);
    Array<uint8_t> result(c.rows * c.columns * 4, "result");
    cuda_on_cpu::options().only_blocks = {{0}, {1}, {128}, {129}};
    CHECK_EQ(cuda::launch(device.problem(c, result.data()), nullptr), cudaSuccess);
    cuda_on_cpu::options().only_blocks.clear();
    const auto columns_from = [&](int64_t first, int64_t count) {
      MatmulProblem some = operands.p;
      some.columns = count;
      some.b.data += first * c.b.row_bytes(c.depth), some.b.scale += first * c.b.blocks(c.depth) * c.b.scale_bytes();
      std::vector<uint8_t> expected(c.rows * count * 4);
      reference::matmul(some, expected.data(), nullptr);
      for (int64_t row = 0; row < c.rows; ++row)
        CHECK_EQ(first_difference(result.data() + 4 * (row * c.columns + first), &expected[4 * row * count],
                                  ElementType::kF32, count),
                 -1);
    };
    columns_from(0, 128), columns_from(8192, 16);
    CHECK_EQ(result.unwritten(), static_cast<size_t>(4 * c.rows * (8192 - 128)));
  }
}

TEST(every_order_of_threads_gives_the_same_bytes) {
  for (const Format& b : {kMxfp4, int4(64), int4(256)}) {
    check_case({b, 5, 64, 1312}, 300, true);
    check_case({b, 33, 64, 800}, 301, true);
  }
}

TEST(the_longest_sums_have_the_references_bytes) {
  for (const Format& b : {int4(128), kMxfp4}) check_case({b, 2, 16, 131'072}, 400);
}

/// A group of 256 products of -128 and -8: the largest sum that its float32 has room for.
TEST(the_largest_group_is_exact) {
  for (const Format& b : weights()) {
    Case c{b, 3, 16, 512};
    c.largest = true;
    check_case(c, 500);
  }
}

/// A sum that is flushed to -0 before the last group stays so: what follows in the kernel's 128 k adds nothing.
TEST(a_sum_of_minus_zero_keeps_its_sign) {
  for (const Format& b : {kMxfp4, int4(32), int4(64)}) {
    const Case c{b, 1, 16, b.block};
    Operands operands(c, 550);
    std::fill(operands.a.begin(), operands.a.end(), 0), operands.a[0] = 1;
    const bool mxfp4 = b.code == CodeType::kE2M1;
    std::fill(operands.b.begin(), operands.b.end(), mxfp4 ? 0x99 : 0x77);  // -0.5 or -1
    for (int64_t n = 0; n < c.columns; ++n)
      if (mxfp4)
        operands.b_scale[n] = 1;  // 2^-126
      else
        reference::put(operands.b_scale.data(), b.scale_type, n, 0);
    reference::put(operands.a_scale.data(), ElementType::kF32, 0, 1);
    const auto result = Device(operands).run(c);
    CHECK(result == operands.reference());
    CHECK_EQ(reference::get_bits(result.data(), ElementType::kF32, 0), mxfp4 ? kSignBit : 0u);
  }
}

TEST(a_row_does_not_depend_on_the_others) {
  const Case many{int4(32), 40, 64, 352}, one{int4(32), 1, 64, 352};
  const Operands operands(many, 600);
  const Device device(operands);
  const auto all = device.run(many), first = device.run(one);
  CHECK(std::equal(first.begin(), first.end(), all.begin()));
}

TEST(a_weight_is_read_once_for_few_rows) {
  const Case c{int4(128), 16, 192, 512};
  const Operands operands(c, 700);
  const Device device(operands);
  device.run(c);
  CHECK_EQ(device.b.traffic().read, operands.b.size());
  CHECK_EQ(device.b_scale.traffic().read, operands.b_scale.size());
  CHECK_EQ(device.a.traffic().read, 3 * operands.a.size());  // once for each 64 columns
}

TEST(what_no_kernel_serves_is_refused) {
  const Case c{int4(128), 16, 192, 512};
  const Operands operands(c, 800);
  const Device device(operands);
  const auto refused = [&](auto change) {
    cuda::Int8ByNibblesProblem p = device.problem(c, nullptr);
    change(p);
    CHECK_EQ(cuda::launch(p, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.columns = 184; });
  refused([](auto& p) { p.depth = 500; });
  refused([](auto& p) { p.a += 8; });
  refused([](auto& p) { p.type = ElementType::kF16; });
  refused([](auto& p) { p.b_format.block = 48; });
  refused([](auto& p) { p.b_format = mx(CodeType::kE2M1, true); });
  refused([](auto& p) { p.b_format = nvfp4(); });
}

}  // namespace
}  // namespace jaxlowprec
