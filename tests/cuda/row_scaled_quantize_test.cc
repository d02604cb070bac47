// The kernels of row-scaled quantisation, executed on a CPU, against the reference, byte for byte.
#include "../../xla_ffi/cuda/launch.h"
#include "device_direction.h"

namespace jaxlowprec {
namespace {

/// Parts of sixteens and of warps; rows of blocks of 128 threads and of 256, held and read again.
constexpr Shape kShapes[] = {{1, 1}, {17, 33}, {3, 50}, {9, 520}, {3, 2064}, {2, 4100}, {1, 4112}, {2, 8208}, {1, 17000}};

/// A case in the device's memory: runs, and is checked byte for byte.
struct DeviceRows {
  RowScaledCase expected;
  DeviceBytes elements, amax;
  DeviceDirection rows;

  DeviceRows(Shape shape, ElementType type, const Format& format, int64_t misalignment, std::mt19937& random)
      : expected(shape, type, format, 0, random),
        elements(expected.x, misalignment, "x"),
        amax(expected.rows.tensor.size(), 0, "amax"),
        rows(expected.rows, misalignment) {
    RowScaledQuantizeProblem p = expected.problem;
    p.x = elements.as(), p.amax = amax.as<float>(), p.data = rows.data.as(), p.scale = rows.scale.as();
    vary_order(random);
    CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
    CHECK_EQ(amax.first_difference(expected.rows.tensor), -1);
    CHECK_EQ(amax.unwritten(), 0);
    rows.check();
  }
};

TEST(row_scaled_quantize_agrees_with_the_reference) {
  std::mt19937 random(1);
  for (const NamedFormat& format : kRowScaled)
    for (const Shape shape : kShapes)
      for (const ElementType type : kTypes) {
        const int64_t misalignment = random() % 2 * 4;
        const check::Given given(name(shape) + " " + name(type) + ", " + format.name + ", misaligned by " +
                                 std::to_string(misalignment));
        DeviceRows(shape, type, format.format, misalignment, random);
      }
}

/// Once, as far as the registers of a row's block go: 8192 elements.
TEST(row_scaled_quantize_reads_the_elements_once) {
  std::mt19937 random(2);
  for (const Shape shape : {Shape{20, 512}, {3, 4096}, {2, 8192}, {1, 16384}}) {
    const check::Given given(name(shape));
    const DeviceRows run(shape, ElementType::kBF16, kNvfp4[0].format, 0, random);
    const int64_t again = run.expected.rows.batch * std::max<int64_t>(shape.columns - 8192, 0);
    CHECK_EQ(run.elements.traffic().read, static_cast<uint64_t>(run.expected.x.size() + 2 * again));
    CHECK_EQ(run.rows.data.traffic().written, static_cast<uint64_t>(run.expected.rows.data.size()));
  }
}

TEST(nothing_is_launched_for_nothing) {
  CHECK_EQ(cuda::launch(RowScaledQuantizeProblem{}, nullptr), cudaSuccess);
  RowScaledQuantizeProblem other{nullptr, ElementType::kF32, 1, 1, 1, mx(CodeType::kE2M1, false), nullptr, nullptr, nullptr};
  CHECK_EQ(cuda::launch(other, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
