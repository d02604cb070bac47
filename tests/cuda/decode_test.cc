// Kernels: dequantize.cu
// Operands of a GEMM as bfloat16 without their tensor scale: exact, and byte for byte by decode.h's rule.
#include "../../xla_ffi/cuda/decode.h"

#include <cuda_runtime.h>

#include "../cpp/check.h"
#include "../cpp/matmul_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

struct Case {
  Format format;
  int64_t batch, rows, columns, depth, width;
};

/// decode.h's rule in double, where products are exact.
uint32_t decoded_bf16(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t row, int64_t k) {
  const double code = reference::decoded_code(operand, rows, batch, row, k);
  const bool apart = operand.format.scaling == Scaling::kTensor || operand.format.scaling == Scaling::kRows;
  const float scale =
      apart ? 1.0f : reference::L::flush(reference::decoded_scale(operand, rows, batch, row, k / operand.format.block));
  const double exact = code * scale;
  if (std::fabs(exact) < 0x1p-126) return std::signbit(exact) ? 0x8000u : 0u;
  if (std::fabs(exact) >= 0x1p128) return std::signbit(exact) ? 0xFF80u : 0x7F80u;
  const uint32_t bits = reference::L::bits(static_cast<float>(exact));
  if (!std::isnan(exact)) CHECK_EQ(bits & 0xFFFFu, 0u);  // exact in bfloat16
  return bits >> 16;
}

void check_case(const Case& c, uint32_t seed) {
  const check::Given given(name(c.format) + ", " + std::to_string(c.batch) + "x" + std::to_string(c.rows) + "x" +
                           std::to_string(c.columns) + ", depth " + std::to_string(c.depth) + ", width " +
                           std::to_string(c.width));
  const AnyCodes codes(c.format, c.batch, c.rows, c.columns, seed);
  MatmulOperand operand{c.format, codes.data.data(), codes.scale.data(), nullptr, c.columns};
  std::vector<uint16_t> expected(c.batch * c.rows * c.width);
  for (int64_t batch = 0; batch < c.batch; ++batch)
    for (int64_t row = 0; row < c.rows; ++row)
      for (int64_t k = 0; k < c.depth; ++k)
        expected[(batch * c.rows + row) * c.width + k] = static_cast<uint16_t>(decoded_bf16(operand, c.rows, batch, row, k));

  const Array<uint8_t> data(codes.data, "data", Access::kReadOnly), scale(codes.scale, "scale", Access::kReadOnly);
  const Array<uint16_t> result(expected.size(), "result");
  operand.data = data.data(), operand.scale = scale.data();
  CHECK_EQ(cuda::launch(cuda::DecodeProblem{operand, c.batch, c.rows, c.depth, c.width, result.data()}, nullptr),
           cudaSuccess);
  CHECK_EQ(first_difference(result.data(), expected.data(), ElementType::kBF16, expected.size()), -1);
  CHECK_EQ(result.unwritten(), 0u);
}

TEST(every_format_gives_exact_bfloat16) {
  uint32_t seed = 0;
  for (const Format& format : kFormats) {
    check_case({format, 1, 1, 1, 1, 8}, ++seed);
    check_case({format, 2, 35, 128, 128, 128}, ++seed);
    check_case({format, 2, 128, 256, 256, 256}, ++seed);
    check_case({format, 1, 35, 128, 128, 144}, ++seed);  // rows of the result padded
    check_case({format, 1, 18, 136, 136, 136}, ++seed);
    check_case({format, 1, 18, 136, 131, 131}, ++seed);  // padding to the other operand's length is cut off
    check_case({format, 1, 18, 136, 131, 136}, ++seed);  // and zero instead
    check_case({format, 2, 18, 128, 120, 128}, ++seed);
    check_case({format, 3, 5, 37, 37, 40}, ++seed);
  }
}

TEST(every_code_and_scale_byte_meets) {
  for (const Format& format : kFormats) {
    if (format.scale_bytes() != 1 || format.tiles) continue;
    const check::Given given(name(format));
    const int64_t columns = format.block * (format.packed() ? 1 : 8);  // all codes
    std::vector<uint8_t> codes, scales;
    for (int scale = 0; scale < 256; ++scale) {
      for (int64_t i = 0; i < format.row_bytes(columns); ++i)
        codes.push_back(static_cast<uint8_t>(format.packed() ? i * 34 + 16 : i));
      for (int64_t i = 0; i < columns / format.block; ++i) scales.push_back(static_cast<uint8_t>(scale));
    }
    const Array<uint8_t> data(codes), scale(scales);
    const Array<uint16_t> result(256 * columns);
    const MatmulOperand operand{format, data.data(), scale.data(), nullptr, columns};
    CHECK_EQ(cuda::launch(cuda::DecodeProblem{operand, 1, 256, columns, columns, result.data()}, nullptr), cudaSuccess);
    for (int64_t i = 0; i < 256 * columns; ++i) {
      const uint16_t expected = static_cast<uint16_t>(decoded_bf16(operand, 256, 0, i / columns, i % columns));
      CHECK_EQ(first_difference(&result[i], &expected, ElementType::kBF16, 1), -1);
    }
  }
}

TEST(a_scale_that_is_no_power_of_two_is_refused) {
  Format format = float8_block(CodeType::kE4M3, false);
  CHECK(cuda::decode_supports(format));
  format.power_of_two = false;
  CHECK(!cuda::decode_supports(format));
  CHECK_EQ(cuda::launch(cuda::DecodeProblem{{format, nullptr, nullptr, nullptr, 128}, 1, 1, 128, 128, nullptr}, nullptr),
           cudaErrorInvalidValue);
}

TEST(each_byte_moves_once) {
  const AnyCodes codes(nvfp4(true), 1, 64, 256, 5);
  const Array<uint8_t> data(codes.data), scale(codes.scale);
  const Array<uint16_t> result(64 * 256);
  const MatmulOperand operand{nvfp4(true), data.data(), scale.data(), nullptr, 256};
  cuda_on_cpu::reset_traffic();
  CHECK_EQ(cuda::launch(cuda::DecodeProblem{operand, 1, 64, 256, 256, result.data()}, nullptr), cudaSuccess);
  CHECK_EQ(data.traffic().read, data.size());
  CHECK_EQ(result.traffic().written, result.size() * 2);
}

}  // namespace
}  // namespace jaxlowprec
