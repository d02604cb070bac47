// The kernels of sums over rows, executed on a CPU, against the reference.
#include "../../xla_ffi/cuda/launch.h"
#include "device_norm.h"

namespace jaxlowprec {
namespace {

using reference::kAnyData;

TEST(rows_are_summed_in_order) {
  std::mt19937 random(1);
  struct Shape {
    int64_t batch, rows, columns;
  };
  for (const Shape s : {Shape{1, 1, 1}, {2, 16, 128}, {3, 19, 33}, {2, 64, 40}, {1, 65, 300}, {2, 130, 7}, {1, 1100, 9}})
    for (const ElementType type : kTypes)
      for (const Data data : kAnyData) {
        const int64_t misalignment = random() % 3 ? 0 : 4;
        const check::Given given(std::to_string(s.rows) + "x" + std::to_string(s.columns) + " " + name(type) +
                                 " misaligned by " + std::to_string(misalignment));
        const Buffer x = reference::filled(type, s.batch * s.rows * s.columns, data, random);
        const DeviceBytes elements(x, misalignment, "x");
        SumOverRowsProblem p{elements.as(), type, s.batch, s.rows, s.columns};
        const DeviceBytes parts(4 * s.batch * p.parts() * s.columns, 0, "parts"), sums(4 * s.batch * s.columns, 0, "sums");
        p.sums = parts.as<float>();
        vary_order(random);
        cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;
        CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
        CHECK_EQ(parts.unwritten(), 0);
        CHECK_EQ(elements.traffic().read, static_cast<uint64_t>(x.size()));
        const AddPartsProblem add{p.sums, s.columns, s.batch, p.parts(), s.columns, sums.as<float>()};
        CHECK_EQ(cuda::launch(add, nullptr), cudaSuccess);
        check_result(sums, reference::sums_over_rows(x, type, s.batch, s.rows, s.columns), ElementType::kF32);
      }
}

TEST(nothing_is_launched_for_nothing) {
  CHECK_EQ(cuda::launch(SumOverRowsProblem{}, nullptr), cudaSuccess);
  const DeviceBytes result(4 * 40, 0, "sums");
  CHECK_EQ(cuda::launch(AddPartsProblem{nullptr, 40, 1, 0, 40, result.as<float>()}, nullptr), cudaSuccess);
  for (int i = 0; i < 40; ++i) CHECK_EQ(result.as<float>()[i], 0.0f);
}

}  // namespace
}  // namespace jaxlowprec
