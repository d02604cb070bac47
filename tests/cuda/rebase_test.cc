// MXFP4 as E4M3 with scales of 128: byte for byte by rebase.h's rule, and the same numbers wherever that can be.
#include "../../xla_ffi/cuda/matmul/rebase.h"

#include <cuda_runtime.h>

#include "../../xla_ffi/cuda/matmul/gemm_error.h"
#include "../cpp/check.h"
#include "../cpp/rebase_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

const Format kRows = mx(CodeType::kE2M1), kSquares = mx(CodeType::kE2M1, true);

/// Codes of every kind, and scales from a range of bytes.
struct Operand {
  Format format;
  int64_t rows, columns;
  std::vector<uint8_t> data, scale;

  Operand(const Format& f, int64_t rows, int64_t columns, int least, int largest, uint32_t seed)
      : format(f),
        rows(rows),
        columns(columns),
        data(any_bytes(rows * f.row_bytes(columns), seed)),
        scale(any_bytes(f.scales(rows, columns), seed + 1)) {
    for (uint8_t& byte : scale) byte = static_cast<uint8_t>(least + byte % (largest - least + 1));
  }

  MatmulOperand on_host() const { return {format, data.data(), scale.data(), nullptr, columns}; }
  uint8_t& scale_at(int64_t row, int64_t block) {
    return scale[(format.tiles ? row / format.block : row) * format.scale_columns(columns) + block];
  }
};

struct Rebased {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Rebased by_the_kernel(const Operand& o) {
  const int64_t width = cuda::rebased_width(o.columns);
  const Array<uint8_t> data(o.data, "data", Access::kReadOnly), scale(o.scale, "scale", Access::kReadOnly);
  const Array<uint8_t> codes(o.rows * width, "codes");
  const Array<float> scales(o.rows * width / 128, "scales");
  const MatmulOperand operand{o.format, data.data(), scale.data(), nullptr, o.columns};
  CHECK_EQ(cuda::launch(cuda::RebaseProblem{operand, o.rows, codes.data(), scales.data()}, nullptr), cudaSuccess);
  CHECK_EQ(codes.unwritten() + scales.unwritten(), 0u);
  CHECK_EQ(data.traffic().read, data.size());
  CHECK_EQ(codes.traffic().written, codes.size());
  CHECK_EQ(scales.traffic().written, 4 * scales.size());
  return {codes.values(), scales.values()};
}

Rebased check_bytes(const Operand& o) {
  const check::Given given(name(o.format) + ", " + std::to_string(o.rows) + "x" + std::to_string(o.columns));
  const reference::Rebased expected(o.on_host(), o.rows);
  const Rebased found = by_the_kernel(o);
  CHECK(found.codes == expected.codes);
  CHECK_EQ(first_difference(found.scales.data(), expected.scales.data(), ElementType::kF32, found.scales.size()), -1);
  return found;
}

constexpr std::pair<int64_t, int64_t> kSizes[] = {{1, 32}, {4, 128}, {33, 160}, {64, 512}, {70, 1120}, {32, 2048}};

TEST(every_number_is_one_of_the_wider_code) {
  uint32_t seed = 100;
  for (const Format& format : {kRows, kSquares})
    for (const auto& [rows, columns] : kSizes) {
      const Operand o(format, rows, columns, 0, 255, ++seed);
      const Array<uint8_t> data(o.data, "data", Access::kReadOnly), codes(rows * columns, "codes");
      const MatmulOperand operand{format, data.data(), nullptr, nullptr, columns};
      CHECK_EQ(cuda::launch(cuda::WidenProblem{operand, rows, codes.data()}, nullptr), cudaSuccess);
      CHECK_EQ(codes.unwritten(), 0u);
      CHECK_EQ(data.traffic().read, data.size());
      for (int64_t i = 0; i < rows * columns; ++i) {
        const float number = reference::decoded_code(o.on_host(), rows, 0, i / columns, i % columns);
        CHECK_EQ((float8_decode<E4M3, float>(codes.values()[i])), number);
        CHECK_EQ(codes.values()[i], static_cast<uint8_t>(float8_encode<E4M3>(number)));  // zero keeps its sign
      }
    }
}

TEST(every_byte_is_the_rules) {
  uint32_t seed = 0;
  for (const Format& format : {kRows, kSquares})
    for (const auto& [rows, columns] : kSizes) {
      check_bytes(Operand(format, rows, columns, 120, 134, ++seed));  // all fit
      check_bytes(Operand(format, rows, columns, 107, 147, ++seed));
      check_bytes(Operand(format, rows, columns, 0, 255, ++seed));
      check_bytes(Operand(format, rows, columns, 0, 9, ++seed));
      check_bytes(Operand(format, rows, columns, 246, 255, ++seed));
    }
}

TEST(every_code_meets_every_difference_of_scales) {
  Operand o(kRows, 256, 128, 0, 0, 1);
  for (size_t i = 0; i < o.data.size(); ++i) o.data[i] = static_cast<uint8_t>(i % 8 * 34 + 16);  // 0 to 15, again and again
  for (const int largest : {255, 254, 127, 20, 7, 6, 0}) {
    for (int64_t row = 0; row < 256; ++row)
      for (int64_t block = 0; block < 4; ++block) o.scale_at(row, block) = static_cast<uint8_t>(block == 2 ? largest : row);
    check_bytes(o);
  }
}

/// In double, where every product is exact.
TEST(numbers_are_the_same_where_scales_fit_and_near_elsewhere) {
  for (const Format& format : {kRows, kSquares})
    for (const int least : {113, 107, 87, 0}) {
      const Operand o(format, 64, 512, least, least ? 127 : 14, least);
      const MatmulOperand on_host = o.on_host();
      const Rebased found = by_the_kernel(o);
      int64_t inexact = 0;
      for (int64_t row = 0; row < o.rows; ++row)
        for (int64_t k = 0; k < o.columns; ++k) {
          const double rebased = double{float8_decode<E4M3, float>(uint32_t{found.codes[row * o.columns + k]})} *
                                 found.scales[k / 128 * o.rows + row];
          const int scale = reference::e8m0_scale(on_host, row, k);
          const int largest = reference::largest_e8m0_scale(on_host, row, k / 128 * 128);
          const double number = std::ldexp(reference::decoded_code(on_host, o.rows, 0, row, k), scale - 127);
          const double bound = scale >= largest - 14 ? 0 : std::ldexp(cuda::kRebaseError, largest - 127);
          CHECK(std::abs(rebased - number) <= bound);
          inexact += rebased != number;
        }
      CHECK_EQ(inexact > 0, least == 107 || least == 87);
    }
}

TEST(a_scale_that_is_nan_poisons_its_128_alone) {
  Operand o(kRows, 8, 256, 120, 130, 3);
  std::fill_n(&o.data[5 * 128], 64, uint8_t{0});  // zeros do not hide it
  o.scale_at(5, 3) = 255;
  const Rebased found = check_bytes(o);
  for (int64_t i = 0; i < 16; ++i) CHECK_EQ(std::isnan(found.scales[i]), i == 5);
}

TEST(blocks_of_zeros_do_not_take_part) {
  Operand o(kRows, 4, 128, 100, 110, 4);
  for (int64_t row = 0; row < 4; ++row) {
    std::fill_n(&o.data[row * 64 + 16], 16, row % 2 ? 0x88 : 0);
    o.scale_at(row, 1) = 254;
  }
  const Rebased found = check_bytes(o);
  for (const float scale : found.scales) CHECK(scale <= std::ldexp(1.0f, 110 - 127 - 6));
  std::fill(o.data.begin(), o.data.end(), 0);
  for (const float scale : check_bytes(o).scales) CHECK_EQ(scale, 0x1p-126f);
}

TEST(the_order_of_threads_and_the_grid_change_nothing) {
  const Operand o(kSquares, 70, 1120, 0, 255, 5);
  cuda_on_cpu::in_every_order([&] { check_bytes(o); });
  cuda_on_cpu::device().multiprocessors = 1, cuda_on_cpu::device().index = 1;
  check_bytes(Operand(kRows, 300, 2080, 0, 255, 6));
}

TEST(what_it_does_not_take) {
  const auto launched = [](const MatmulOperand& operand) {
    return cuda::launch(cuda::RebaseProblem{operand, 4, nullptr, nullptr}, nullptr);
  };
  CHECK_EQ(launched({mx(CodeType::kE4M3), nullptr, nullptr, nullptr, 128}), cudaErrorInvalidValue);
  CHECK_EQ(launched({nvfp4(), nullptr, nullptr, nullptr, 128}), cudaErrorInvalidValue);
  CHECK_EQ(launched({kRows, nullptr, nullptr, nullptr, 100}), cudaErrorInvalidValue);
  CHECK_EQ(launched({kRows, reinterpret_cast<const uint8_t*>(4), nullptr, nullptr, 128}), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
