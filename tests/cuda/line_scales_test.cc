// Sums of a GEMM times the scales of both operands' lines, executed on a CPU.
#include "../../xla_ffi/cuda/matmul/line_scales.h"

#include "../cpp/check.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

/// Integers up to the largest sum, of which float32 does not hold each, or numbers of every kind.
std::vector<uint32_t> any_sums(bool integers, int64_t count, uint32_t seed) {
  std::vector<uint32_t> sums(count);
  std::mt19937 random(seed);
  if (integers) {
    for (uint32_t& sum : sums) sum = random() % 4 ? random() : random() % 200 - 100;
  } else {
    const auto bytes = any_elements(ElementType::kF32, count, seed, false);
    std::memcpy(sums.data(), bytes.data(), bytes.size());
  }
  return sums;
}

void check_line_scales(bool integers, ElementType type, int64_t rows, int64_t columns, bool accumulates, uint32_t seed) {
  const check::Given given((integers ? "int32, " : "float32, ") + name(type) + ", " + std::to_string(rows) + "x" +
                           std::to_string(columns));
  const int64_t count = rows * columns, size = reference::element_size(type);
  const std::vector<uint32_t> sums = any_sums(integers, count, seed);
  std::mt19937 random(seed + 1);
  std::vector<float> of_rows(rows), of_columns(columns);
  for (auto* scales : {&of_rows, &of_columns})
    for (float& scale : *scales) scale = std::ldexp(1 + static_cast<float>(random() % 4096) / 4096, random() % 8 ? -6 : -70);
  const std::vector<uint8_t> onto = any_elements(type, count, seed + 2, true);

  const Array<uint32_t> sums_there(sums, "sums", Access::kReadOnly);
  const Array<float> rows_there(of_rows, "rows", Access::kReadOnly), columns_there(of_columns, "columns", Access::kReadOnly);
  const Array<uint8_t> onto_there(onto, "onto", Access::kReadOnly), result(count * size, "result");
  const cuda::LineScalesProblem p{sums_there.data(),
                                  integers,
                                  rows,
                                  columns,
                                  rows_there.data(),
                                  columns_there.data(),
                                  accumulates ? onto_there.data() : nullptr,
                                  result.data(),
                                  type};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  std::vector<uint8_t> expected(count * size);
  for (int64_t i = 0; i < count; ++i) {
    const float sum = integers ? static_cast<float>(static_cast<int32_t>(sums[i])) : Lanes<float>::from_bits(sums[i]);
    const float y = reference::multiply(reference::multiply(sum, of_columns[i % columns]), of_rows[i / columns]);
    reference::put(expected.data(), type, i, accumulates ? reference::add(y, reference::get(onto.data(), type, i)) : y);
  }
  CHECK_EQ(first_difference(result.data(), expected.data(), type, count), -1);
  CHECK_EQ(result.unwritten(), size_t{0});
  CHECK_EQ(sums_there.traffic().read, static_cast<uint64_t>(4 * count));
}

TEST(line_scales_agree_with_the_reference) {
  uint32_t seed = 0;
  for (const bool integers : {false, true})
    for (const ElementType type : kTypes)
      for (const auto& [rows, columns] : {std::pair{1, 4}, {3, 16}, {70, 144}, {2, 5000}})
        for (const bool accumulates : {false, true}) check_line_scales(integers, type, rows, columns, accumulates, ++seed);
}

/// The other order of the two roundings gives other numbers: the test above would see it.
TEST(the_order_of_scales_is_seen) {
  int64_t other = 0;
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const float sum = static_cast<float>(random() % 100000), a = 1 + 1 / static_cast<float>(random() % 999 + 3),
                b = 1 + 1 / static_cast<float>(random() % 999 + 3);
    other += (sum * b) * a != (sum * a) * b;
  }
  CHECK(other > 100);
}

TEST(what_no_kernel_serves_is_refused) {
  CHECK_EQ(cuda::launch(cuda::LineScalesProblem{}, nullptr), cudaSuccess);
  cuda::LineScalesProblem p{};
  p.rows = 1, p.columns = 6;
  CHECK_EQ(cuda::launch(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
