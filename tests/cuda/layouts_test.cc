// Scales in the order that cuBLASLt reads, by the formulas of numerics.md 6 and of its documentation.
#include "../../xla_ffi/cuda/matmul/layouts.h"

#include <cuda_runtime.h>

#include "../cpp/check.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Where the scale of (row, block) belongs, in scales.
int64_t place(const Format& f, int64_t rows, int64_t blocks, int64_t i, int64_t j) {
  if (f.scaling == Scaling::kFloat32)
    return f.tiles ? i / f.block * (divide_up(blocks, 4) * 4) + j : j * (divide_up(rows, 4) * 4) + i;
  return ((i / 128) * divide_up(blocks, 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4;
}

void check_layout(const Format& f, int64_t batch, int64_t rows, int64_t columns, uint32_t seed) {
  const check::Given given(name(f) + ", " + std::to_string(batch) + "x" + std::to_string(rows) + "x" +
                           std::to_string(columns));
  const AnyCodes codes(f, batch, rows, columns, seed);
  const int64_t bytes = cuda::gemm_scale_bytes(f, rows, columns), blocks = f.scale_columns(columns), size = f.scale_bytes();
  std::vector<uint8_t> expected(batch * bytes);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < blocks; ++j) {
        const int64_t row = f.tiles ? i / f.block : i;
        std::memcpy(&expected[b * bytes + place(f, rows, blocks, i, j) * size],
                    &codes.scale[((b * f.scale_rows(rows) + row) * blocks + j) * size], size);
      }
  const Array<uint8_t> scale(codes.scale, "scale", Access::kReadOnly), result(expected.size(), "result");
  CHECK_EQ(cuda::launch(cuda::ScaleLayoutProblem{f, scale.data(), batch, rows, columns, result.data()}, nullptr),
           cudaSuccess);
  CHECK(result.values() == expected);
  CHECK_EQ(result.unwritten(), 0u);
  CHECK_EQ(result.traffic().written, result.size());
  if (!f.tiles) CHECK_EQ(scale.traffic().read, scale.size());
}

TEST(every_layout_puts_each_scale_where_the_formula_says) {
  uint32_t seed = 0;
  for (const Format& format : kFormats) {
    if (format.scaling == Scaling::kTensor || format.scaling == Scaling::kRows) continue;
    check_layout(format, 1, 1, 1, ++seed);
    check_layout(format, 1, 128, 1024, ++seed);
    check_layout(format, 2, 130, 80, ++seed);
    check_layout(format, 3, 70, 1300, ++seed);
    check_layout(format, 2, 300, 640, ++seed);
    check_layout(format, 1, 33, 5000, ++seed);
  }
}

TEST(the_order_of_threads_changes_nothing) {
  cuda_on_cpu::in_every_order([] {
    check_layout(nvfp4(true), 1, 130, 80, 1);
    check_layout(float8_block(CodeType::kE4M3, false), 1, 70, 1300, 2);
  });
}

TEST(scales_of_tensors_and_lines_have_one_layout) {
  for (const Format& format : {float8_tensor(CodeType::kE4M3), line_format(CodeType::kE4M3)})
    CHECK_EQ(cuda::launch(cuda::ScaleLayoutProblem{format, nullptr, 1, 1, 1, nullptr}, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
