// The kernel of the amaxes of lines, executed on a CPU, against the reference.
#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/reference.h"
#include "device_copies.h"

namespace jaxlowprec {
namespace {

struct Shape {
  int64_t batch, rows, columns;
};

/// Parts of pieces, of warps' rows and of tiles on either side.
constexpr Shape kShapes[] = {{2, 1, 1}, {3, 1, 16}, {2, 17, 33}, {1, 300, 300}, {1, 257, 128}, {2, 9, 520}, {1, 1, 3000}};

void check_line_amaxes(const Shape& shape, ElementType type, const Buffer& x, int64_t misalignment, bool rows, bool columns,
                       std::mt19937& random) {
  const DeviceBytes elements(x, misalignment, "x");
  const DeviceBytes of_rows(shape.batch * shape.rows * 4, 0, "rows"),
      of_columns(shape.batch * shape.columns * 4, 0, "columns");
  LineAmaxesProblem p{elements.as(), type, shape.batch, shape.rows, shape.columns, nullptr, nullptr};
  if (rows) p.of_rows = of_rows.as<uint32_t>();
  if (columns) p.of_columns = of_columns.as<uint32_t>();
  vary_order(random);
  cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  const AmaxProblem given{x.as(), type, shape.batch, shape.rows, shape.columns, nullptr, nullptr, 0};
  for (int64_t b = 0; b < shape.batch; ++b)
    for (const bool columnwise : {false, true}) {
      if (!(columnwise ? columns : rows)) continue;
      const reference::Lines lines = reference::lines_of(given, b, columnwise, false);
      const uint32_t* found = (columnwise ? of_columns : of_rows).as<uint32_t>() + b * lines.count;
      for (int64_t line = 0; line < lines.count; ++line)
        CHECK_EQ(found[line], Lanes<float>::bits(reference::amax_of_line(lines, line)));
    }
}

TEST(line_amaxes_agree_with_the_reference) {
  std::mt19937 random(1);
  for (const Shape& shape : kShapes)
    for (const ElementType type : kTypes)
      for (const Data data : {Data::kNormal, Data::kSparse, Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity}) {
        const check::Given given(std::to_string(shape.rows) + "x" + std::to_string(shape.columns) + " " + name(type) +
                                 " data " + std::to_string(static_cast<int>(data)));
        const int64_t size = shape.rows * shape.columns, misalignment = random() % 4 * 4;
        const Buffer x(shape.batch * size * reference::element_size(type));
        for (int64_t b = 0; b < shape.batch; ++b)  // matrices are independent
          fill_elements(x.as(), type, b * size, size, b % 2 ? Data::kNormal : data, random);
        const int which = static_cast<int>(random() % 3);
        check_line_amaxes(shape, type, x, misalignment, which != 1, which != 0, random);
      }
}

TEST(elements_are_read_once_for_both) {
  std::mt19937 random(2);
  const Buffer x(512 * 1024 * 2);
  fill_elements(x.as(), ElementType::kBF16, 0, 512 * 1024, Data::kNormal, random);
  const DeviceBytes elements(x, 0, "x"), of_rows(512 * 4, 0, "rows"), of_columns(1024 * 4, 0, "columns");
  const LineAmaxesProblem p{elements.as(),          ElementType::kBF16,       1, 512, 1024,
                            of_rows.as<uint32_t>(), of_columns.as<uint32_t>()};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(elements.traffic().read, static_cast<uint64_t>(x.size()));
}

TEST(nothing_is_launched_for_nothing) { CHECK_EQ(cuda::launch(LineAmaxesProblem{}, nullptr), cudaSuccess); }

}  // namespace
}  // namespace jaxlowprec
