// Codes of every format back to numbers: byte for byte the scalar reference, and each byte moved once.
#include <cuda_runtime.h>

#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/quantize_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

struct Case {
  Format format;
  ElementType type;
  int64_t batch, rows, columns;
  bool rotate = false;
  int64_t misalignment = 0;  // of the result, in elements
};

void check_case(const Case& c, uint32_t seed) {
  const check::Given given(name(c.format) + " to " + name(c.type) + ", " + std::to_string(c.batch) + "x" +
                           std::to_string(c.rows) + "x" + std::to_string(c.columns) + (c.rotate ? ", rotated" : ""));
  const AnyCodes codes(c.format, c.batch, c.rows, c.columns, seed);
  const bool two_level = c.format.scaling == Scaling::kTwoLevel;
  DequantizeProblem p{};
  p.format = c.format, p.data = codes.data.data(), p.scale = codes.scale.data();
  p.amax = two_level ? codes.amax.data() : nullptr;
  p.batch = c.batch, p.rows = c.rows, p.columns = c.columns;
  p.rotate = c.rotate, p.sign_mask = kDefaultSignMask, p.type = c.type;
  const int64_t count = c.batch * c.rows * c.columns, size = reference::element_size(c.type);
  std::vector<uint8_t> expected(count * size);
  reference::dequantize(p, expected.data());

  const Array<uint8_t> data(codes.data, "data", Access::kReadOnly), scale(codes.scale, "scale", Access::kReadOnly);
  const Array<float> amax(codes.amax, "amax", Access::kReadOnly);
  const Array<uint8_t> result((count + c.misalignment) * size, "result");
  p.data = data.data(), p.scale = scale.data(), p.amax = two_level ? amax.data() : nullptr;
  p.result = result.data() + c.misalignment * size;
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(first_difference(p.result, expected.data(), c.type, count), -1);
  CHECK_EQ(result.unwritten(), static_cast<size_t>(c.misalignment * size));
}

struct Shape {
  int64_t batch, rows, columns;
};
constexpr Shape kShapes[] = {{1, 1, 1}, {1, 3, 16}, {2, 5, 37}, {3, 17, 40}, {1, 70, 136}, {2, 2, 2300}};

TEST(every_format_gives_the_bytes_of_the_reference) {
  uint32_t seed = 0;
  for (const Format& format : kFormats)
    for (const ElementType type : kTypes)
      for (const Shape& s : kShapes) check_case({format, type, s.batch, s.rows, s.columns}, ++seed);
}

TEST(a_rotation_of_nvfp4_is_undone) {
  uint32_t seed = 1000;
  for (const ElementType type : kTypes)
    for (const Shape& s : kShapes) check_case({nvfp4(false), type, s.batch, s.rows, s.columns, true}, ++seed);
}

TEST(a_result_of_any_alignment_will_do) {
  for (const int64_t misalignment : {1, 4}) {
    check_case({nvfp4(false), ElementType::kBF16, 1, 3, 48, false, misalignment}, 7);
    check_case({mx(CodeType::kE4M3, false), ElementType::kF32, 1, 3, 48, false, misalignment}, 8);
  }
}

TEST(the_order_of_threads_changes_nothing) {
  cuda_on_cpu::in_every_order([] { check_case({nvfp4(false), ElementType::kBF16, 1, 9, 72, true}, 3); });
}

/// A thread's eight elements: their codes, one scale, for two-level formats the amax.
TEST(each_byte_moves_once) {
  constexpr int64_t kRows = 64, kColumns = 256;
  for (const Format& format : {nvfp4(false), mx(CodeType::kE4M3, false)}) {
    const check::Given given(name(format));
    const AnyCodes codes(format, 1, kRows, kColumns, 5);
    const Array<uint8_t> data(codes.data), scale(codes.scale);
    const Array<float> amax(codes.amax);
    const Array<uint16_t> result(kRows * kColumns);
    DequantizeProblem p{};
    p.format = format, p.data = data.data(), p.scale = scale.data(), p.amax = amax.data();
    p.batch = 1, p.rows = kRows, p.columns = kColumns, p.result = result.data(), p.type = ElementType::kBF16;
    cuda_on_cpu::reset_traffic();
    CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
    CHECK_EQ(data.traffic().read, data.size());
    CHECK_EQ(scale.traffic().read, static_cast<uint64_t>(kRows * kColumns / 8));
    CHECK_EQ(result.traffic().written, static_cast<uint64_t>(kRows * kColumns * 2));
    CHECK_EQ(result.traffic().read, 0u);
  }
}

TEST(indices_pass_two_to_the_31) {
  constexpr int64_t kColumns = 512, kRows = (int64_t{1} << 22) + 64, kLast = kRows - 16;  // the last block has 16 rows
  const Format format = mx(CodeType::kE4M3, false);
  const AnyCodes codes(format, 1, 16, kColumns, 9);
  DequantizeProblem p{};
  p.format = format, p.data = codes.data.data(), p.scale = codes.scale.data();
  p.batch = 1, p.rows = 16, p.columns = kColumns, p.type = ElementType::kBF16;
  std::vector<uint8_t> expected(16 * kColumns * 2);
  reference::dequantize(p, expected.data());
  const Array<uint8_t> data = Array<uint8_t>::zeros(kRows * kColumns, "data");
  const Array<uint8_t> scale = Array<uint8_t>::zeros(kRows * kColumns / 32, "scale");
  const Array<uint16_t> result(kRows * kColumns, "result");
  std::memcpy(&data[kLast * kColumns], codes.data.data(), codes.data.size());
  std::memcpy(&scale[kLast * kColumns / 32], codes.scale.data(), codes.scale.size());
  p.data = data.data(), p.scale = scale.data(), p.rows = kRows, p.result = result.data();
  cuda_on_cpu::options().only_blocks = {dim3(kRows / 16 - 1, 0, 0)};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  cuda_on_cpu::options().only_blocks = {};
  CHECK_EQ(first_difference(&result[kLast * kColumns], expected.data(), ElementType::kBF16, 16 * kColumns), -1);
}

TEST(what_no_kernel_serves_is_refused) {
  DequantizeProblem p{};
  p.format = mx(CodeType::kE4M3, false), p.rotate = true, p.batch = p.rows = p.columns = 16;
  CHECK_EQ(cuda::launch(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
