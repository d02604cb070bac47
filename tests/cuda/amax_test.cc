// The amax kernels, executed on a CPU, against the reference.
#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/reference.h"
#include "device_copies.h"

namespace jaxlowprec {
namespace {

struct Shape {
  int64_t batch, rows, columns;
};

/// Parts of pieces, of tiles and of a grid on either side; many matrices in a block's hands.
constexpr Shape kShapes[] = {{2, 1, 1},    {3, 1, 16},   {2, 16, 1},  {2, 17, 33},  {1, 3, 50},   {2, 40, 300},
                             {1, 64, 128}, {2, 65, 129}, {1, 256, 9}, {1, 1, 8200}, {300, 3, 10}, {1, 200, 130}};

std::string name(const Shape& shape, ElementType type) {
  return std::to_string(shape.batch) + "x" + std::to_string(shape.rows) + "x" + std::to_string(shape.columns) + " " +
         name(type);
}

/// Runs the kernel; `device` describes a small machine at times, so that a block meets many tiles.
void check_amax(const Shape& shape, ElementType type, const Buffer& x, int64_t misalignment, bool plain, bool rotated,
                std::mt19937& random) {
  const DeviceBytes elements(x, misalignment, "x");
  const DeviceBytes found(shape.batch * 4, 0, "plain"), found_rotated(shape.batch * 4, 0, "rotated");
  AmaxProblem p{elements.as(), type, shape.batch, shape.rows, shape.columns, nullptr, nullptr, kDefaultSignMask};
  if (plain) p.plain = found.as<uint32_t>();
  if (rotated) p.rotated = found_rotated.as<uint32_t>();
  vary_order(random);
  cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  p.x = x.as();
  for (int64_t b = 0; b < shape.batch; ++b) {
    if (plain) CHECK_EQ(found.as<uint32_t>()[b], reference::amax_bits(reference::lines_of(p, b, false, false)));
    if (rotated) CHECK_EQ(found_rotated.as<uint32_t>()[b], reference::amax_bits(reference::lines_of(p, b, true, true)));
  }
}

TEST(amax_and_rotated_amax_agree_with_the_reference) {
  std::mt19937 random(1);
  for (const Shape& shape : kShapes)
    for (const ElementType type : kTypes)
      for (const Data data : {Data::kNormal, Data::kSparse, Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity})
        for (const bool rotated : {false, true}) {
          const check::Given given(name(shape, type) + " data " + std::to_string(static_cast<int>(data)));
          const int64_t size = shape.rows * shape.columns, misalignment = random() % 4 * 4;
          const Buffer x(shape.batch * size * reference::element_size(type));
          for (int64_t b = 0; b < shape.batch; ++b)  // matrices are independent
            fill_elements(x.as(), type, b * size, size, b % 2 ? Data::kNormal : data, random);
          check_amax(shape, type, x, misalignment, !rotated || random() % 2, rotated, random);
        }
}

TEST(rotated_amax_sees_sums_that_overflow) {
  std::mt19937 random(2);
  for (const ElementType type : kTypes) {
    const check::Given given(name(type));
    const Buffer x(16 * reference::element_size(type));
    const float large = type == ElementType::kF16 ? 60000.0f : 3e38f;
    for (int64_t i = 0; i < 16; ++i) reference::put(x.as(), type, i, (kDefaultSignMask >> i) & 1 ? -large : large);
    check_amax({1, 16, 1}, type, x, 0, false, true, random);
  }
}

TEST(rotated_amax_sees_infinities_that_meet) {
  std::mt19937 random(3);
  for (const ElementType type : kTypes) {
    const check::Given given(name(type));
    const Buffer x(16 * reference::element_size(type));
    for (int64_t i = 0; i < 16; ++i)
      reference::put(x.as(), type, i, i % 8 == 3 ? std::numeric_limits<float>::infinity() : 1.0f);
    check_amax({1, 16, 1}, type, x, 0, false, true, random);
  }
}

TEST(amax_reads_every_element_once) {
  for (const ElementType type : kTypes)
    for (const bool rotated : {false, true}) {
      const check::Given given(name(type) + (rotated ? " rotated" : ""));
      const int64_t rows = 128, columns = 256, bytes = rows * columns * reference::element_size(type);
      const DeviceBytes x(Buffer(bytes), 0, "x"), plain(4, 0, "plain"), found(4, 0, "rotated");
      AmaxProblem p{x.as(), type, 1, rows, columns, plain.as<uint32_t>(), nullptr, kDefaultSignMask};
      if (rotated) p.rotated = found.as<uint32_t>();
      CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
      CHECK_EQ(x.traffic().read, static_cast<uint64_t>(bytes));
    }
}

}  // namespace
}  // namespace jaxlowprec
