// Hadamard transforms along rows and columns: byte for byte the scalar reference, and each byte moved once.
#include <cuda_runtime.h>

#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

struct Case {
  ElementType type;
  int32_t size;
  int64_t batch, rows, columns;
  bool vertical = false, inverse = false;
  int64_t misalignment = 0;  // of x and the result, in elements
  bool drawn = false;        // signs in the device's memory, others for each matrix
};

std::vector<uint32_t> some_signs(int32_t size) {
  std::mt19937 random(size);
  std::vector<uint32_t> signs(size);
  for (uint32_t& sign : signs) sign = random() % 2 ? kSignBit : 0u;
  return signs;
}

void check_case(const Case& c, uint32_t seed) {
  const check::Given given(name(c.type) + ", " + std::to_string(c.size) + " of " + std::to_string(c.batch) + "x" +
                           std::to_string(c.rows) + "x" + std::to_string(c.columns) + (c.vertical ? ", vertical" : "") +
                           (c.inverse ? ", inverse" : "") + (c.drawn ? ", drawn" : ""));
  const int64_t count = c.batch * c.rows * c.columns, size = reference::element_size(c.type);
  const std::vector<uint32_t> signs = some_signs(c.size);
  const std::vector<uint8_t> elements = any_elements(c.type, count, seed, seed % 4 != 0);
  std::vector<uint8_t> expected(count * size);
  HadamardProblem p{elements.data(), c.type,     c.batch,   c.rows,       c.columns,
                    c.size,          c.vertical, c.inverse, signs.data(), nullptr};
  std::mt19937 random(seed);
  std::vector<uint32_t> words(4 * c.batch);
  for (uint32_t& word : words) word = random();
  const Array<uint32_t> drawn(words, "drawn signs", Access::kReadOnly);
  if (c.drawn) p.drawn_signs = words.data();
  reference::hadamard(p, expected.data());
  if (c.drawn) p.drawn_signs = drawn.data(), p.sign_bits = nullptr;

  std::vector<uint8_t> shifted(c.misalignment * size);
  shifted.insert(shifted.end(), elements.begin(), elements.end());
  const Array<uint8_t> x(shifted, "x", Access::kReadOnly), result(shifted.size(), "result");
  p.x = x.data() + c.misalignment * size, p.result = result.data() + c.misalignment * size;
  cuda_on_cpu::reset_traffic();
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(first_difference(p.result, expected.data(), c.type, count), -1);
  CHECK_EQ(x.traffic().read, static_cast<uint64_t>(count * size));
  CHECK_EQ(result.traffic().written, static_cast<uint64_t>(count * size));
  CHECK_EQ(result.unwritten(), static_cast<size_t>(c.misalignment * size));
}

constexpr int32_t kSizes[] = {16, 32, 64, 128, 256};

TEST(rows_give_the_bytes_of_the_reference) {
  uint32_t seed = 0;
  for (const ElementType type : kTypes)
    for (const int32_t size : kSizes)
      for (const bool inverse : {false, true}) {
        check_case({type, size, 1, 1, size, false, inverse}, ++seed);
        check_case({type, size, 2, 19, 3 * size, false, inverse}, ++seed);  // more than a block, the last one not full
        check_case({type, size, 1, 67, size, false, inverse}, ++seed);
      }
}

TEST(columns_give_the_bytes_of_the_reference) {
  uint32_t seed = 1000;
  for (const ElementType type : kTypes)
    for (const int32_t size : kSizes)
      for (const bool inverse : {false, true})
        for (const int64_t columns : {1, 33, 66, 130}) check_case({type, size, 2, 2 * size, columns, true, inverse}, ++seed);
}

TEST(drawn_signs_are_those_of_each_matrix) {
  uint32_t seed = 2000;
  for (const ElementType type : kTypes)
    for (const int32_t size : {16, 32, 64, 128})
      for (const bool vertical : {false, true})
        for (const bool inverse : {false, true})
          for (const int64_t batch : {1, 3}) {
            const int64_t rows = vertical ? 2 * size : 19, columns = vertical ? 37 : 3 * size;
            check_case({type, size, batch, rows, columns, vertical, inverse, 0, true}, ++seed);
          }
}

TEST(the_order_of_threads_changes_nothing) {
  cuda_on_cpu::in_every_order([] {
    check_case({ElementType::kBF16, 256, 1, 3, 256}, 1);
    check_case({ElementType::kF32, 64, 1, 64, 40, true}, 2);
    check_case({ElementType::kBF16, 256, 1, 256, 70, true}, 3);
  });
}

TEST(indices_pass_two_to_the_31) {
  constexpr int64_t kColumns = 512, kRows = (int64_t{1} << 22) + 256, kLast = kRows - 256;
  const std::vector<uint8_t> elements = any_elements(ElementType::kBF16, 256 * kColumns, 9);
  const std::vector<uint32_t> signs = some_signs(256);
  const Array<uint16_t> x = Array<uint16_t>::zeros(kRows * kColumns, "x");
  std::memcpy(&x[kLast * kColumns], elements.data(), elements.size());
  for (const bool vertical : {false, true}) {
    const check::Given given(vertical ? "vertical" : "rows");
    HadamardProblem p{elements.data(), ElementType::kBF16, 1, 256, kColumns, 256, vertical, false, signs.data(), nullptr};
    std::vector<uint8_t> expected(elements.size());
    reference::hadamard(p, expected.data());
    const Array<uint16_t> result(kRows * kColumns, "result");
    p.x = x.data(), p.result = result.data(), p.rows = kRows;
    // The last block: of 32 transforms of two per row, or of 64 columns.
    const unsigned blocks = static_cast<unsigned>(vertical ? kRows / 256 * 8 : kRows * 2 / 32);
    cuda_on_cpu::options().only_blocks = {dim3(blocks - 1, 0, 0)};
    CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
    cuda_on_cpu::options().only_blocks = {};
    const int64_t rows = vertical ? 256 : 16, columns = vertical ? 64 : kColumns;
    for (int64_t row = 256 - rows; row < 256; ++row)
      CHECK_EQ(first_difference(&result[(kLast + row) * kColumns + kColumns - columns],
                                &expected[(row * kColumns + kColumns - columns) * 2], ElementType::kBF16, columns),
               -1);
  }
}

TEST(what_no_kernel_serves_is_refused) {
  const std::vector<uint32_t> signs(512);
  const Array<uint8_t> x = Array<uint8_t>::zeros(4096);
  const auto launch = [&](int32_t size, int64_t columns, int64_t misalignment) {
    return cuda::launch(HadamardProblem{x.data() + misalignment, ElementType::kBF16, 1, 1, columns, size, false, false,
                                        signs.data(), x.data()},
                        nullptr);
  };
  CHECK_EQ(launch(512, 512, 0), cudaErrorInvalidValue);
  CHECK_EQ(launch(8, 16, 0), cudaErrorInvalidValue);
  CHECK_EQ(launch(32, 48, 0), cudaErrorInvalidValue);
  CHECK_EQ(launch(16, 16, 4), cudaErrorInvalidValue);
  CHECK_EQ(launch(16, 0, 0), cudaSuccess);
  const Array<uint32_t> drawn(std::vector<uint32_t>(4), "drawn signs");
  HadamardProblem p{x.data(), ElementType::kBF16, 1, 1, 256, 256, false, false, nullptr, x.data()};
  p.drawn_signs = drawn.data();
  CHECK_EQ(cuda::launch(p, nullptr), cudaErrorInvalidValue);  // there are 128
}

}  // namespace
}  // namespace jaxlowprec
