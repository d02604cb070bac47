// What quantisation did to an array, counted by the GPU's kernels, executed on a CPU, against the oracle.
// Kernels: sums.cu
#include "../../xla_ffi/cuda/statistics/statistics.h"

#include "../../xla_ffi/statistics_vector.h"
#include "../cpp/statistics_reference.h"
#include "device_copies.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

template <class Part>
Array<uint8_t> workspace(int64_t batch) {
  return Array<uint8_t>(cuda::workspace_for<Part>(batch), "workspace");
}

/// Matrices with ordinary numbers but for the first, as bytes in the device's memory.
Buffer some_elements(ElementType type, int64_t batch, Shape shape, Data data, std::mt19937& random) {
  const int64_t size = shape.rows * shape.columns;
  Buffer x(batch * size * reference::element_size(type));
  for (int64_t b = 0; b < batch; ++b) fill_elements(x.as(), type, b * size, size, b ? Data::kNormal : data, random);
  return x;
}

void check_moments(ElementType type, int64_t batch, Shape shape, Data data, std::mt19937& random) {
  const check::Given given(std::to_string(batch) + " of " + name(shape) + " " + name(type) + " " + name(data));
  const Buffer x = some_elements(type, batch, shape, data, random);
  const DeviceBytes elements(x, random() % 4 * 4, "x");
  const Array<float> moments(batch * 2, "moments");
  const Array<int32_t> beyond(batch * shape.columns, "beyond");
  const Array<float> threshold(std::vector<float>(batch, 1.5f), "threshold", Access::kReadOnly);
  const auto scratch = workspace<cuda::MomentsOfPart>(batch);
  vary_order(random);
  CHECK_EQ(cuda::launch(MomentsProblem{elements.as(), type, batch, shape.rows * shape.columns, moments.data()},
                        scratch.data(), nullptr),
           cudaSuccess);
  CHECK_EQ(
      cuda::launch(OutliersProblem{elements.as(), type, batch, shape.rows, shape.columns, threshold.data(), beyond.data()},
                   nullptr),
      cudaSuccess);
  for (int64_t b = 0; b < batch; ++b) {
    const ExpectedMoments expected(x.as(), type, shape, b, 1.5f);
    const double rms = moments[2 * b + 1], expected_rms = std::sqrt(expected.energy / (shape.rows * shape.columns));
    CHECK_EQ(moments[2 * b], expected.largest);
    CHECK(std::fabs(rms - expected_rms) <= 1e-6 * expected_rms);
    for (int64_t c = 0; c < shape.columns; ++c) CHECK_EQ(beyond[b * shape.columns + c], expected.beyond[c]);
  }
}

TEST(moments_and_outliers_are_those_of_the_finite_elements) {
  std::mt19937 random(1);
  for (const Shape shape : shapes())
    for (const ElementType type : kTypes)
      for (const Data data : kAnyData) check_moments(type, 2, shape, data, random);
}

TEST(moments_of_many_parts_and_of_many_matrices) {
  std::mt19937 random(2);
  check_moments(ElementType::kBF16, 1, {300, 700}, Data::kSparse, random);
  check_moments(ElementType::kF32, 700, {3, 37}, Data::kNaN, random);
  check_moments(ElementType::kF16, 1, {600, 264}, Data::kInfinity, random);
  // A part goes through several tiles.
  check_moments(ElementType::kF32, 400, {1, 13000}, Data::kWide, random);
}

/// The sums of a case, by the kernels.
std::vector<double> sums_of(SumsCase& c, std::mt19937& random) {
  const DeviceBytes x(c.x, random() % 2 * 4, "x"), data(c.data, random() % 2 * 4, "data"), scale(c.scale, 0, "scale");
  const Array<float> amax(std::vector<float>(c.amax, c.amax + SumsCase::kBatch), "amax", Access::kReadOnly);
  const Array<float> unit(std::vector<float>(c.unit, c.unit + SumsCase::kBatch), "unit", Access::kReadOnly);
  const Array<float> result(SumsCase::kBatch * kSums, "result");
  const auto scratch = workspace<cuda::SumsOfPart>(SumsCase::kBatch);
  SumsProblem p = c.p;
  p.x = x.as(), p.data = data.as(), p.scale = scale.as(), p.unit = unit.data(), p.result = result.data();
  if (p.amax) p.amax = amax.data();
  CHECK_EQ(cuda::launch(p, scratch.data(), nullptr), cudaSuccess);
  CHECK_EQ(result.unwritten(), 0u);
  return std::vector<double>(result.data(), result.data() + result.size());
}

void check_sums(Shape shape, ElementType type, const NamedFormat& format, bool columnwise, Data data, std::mt19937& random) {
  const check::Given given(name(shape) + " " + name(type) + " " + format.name + (columnwise ? " columnwise " : " ") +
                           name(data));
  SumsCase c(shape, type, format.format, columnwise, data, random);
  vary_order(random);
  c.check(sums_of(c, random));
}

TEST(sums_are_those_of_the_elements) {
  std::mt19937 random(3);
  for (const Shape shape : shapes())
    for (const NamedFormat& format : formats())
      for (const bool columnwise : {false, true})
        check_sums(shape, kTypes[random() % 3], format, columnwise, kSummable[random() % 5], random);
}

TEST(sums_of_whole_eights_of_long_lines_and_of_many_parts) {
  std::mt19937 random(4);
  for (const NamedFormat& format : formats())
    for (const ElementType type : kTypes) {
      check_sums({40, 1160}, type, format, false, Data::kNormal, random);
      check_sums({1160, 40}, type, format, true, Data::kNormal, random);
    }
  // More lines than parts have at once: some go through two items.
  check_sums({16700, 3}, ElementType::kBF16, kNvfp4[0], false, Data::kSparse, random);
  check_sums({2, 16700}, ElementType::kBF16, {"MXFP8", mx(CodeType::kE4M3)}, true, Data::kNaN, random);
  check_sums({16700, 2}, ElementType::kF32, {"Float8Tensor", float8_tensor(CodeType::kE5M2)}, false, Data::kInfinity,
             random);
}

TEST(sums_do_not_depend_on_the_order_of_threads) {
  std::mt19937 random(5);
  SumsCase c({130, 300}, ElementType::kBF16, nvfp4(false), false, Data::kNormal, random);
  std::vector<double> first;
  cuda_on_cpu::in_every_order([&] {
    const std::vector<double> found = sums_of(c, random);
    if (first.empty()) first = found;
    CHECK(found == first);
  });
}

TEST(each_element_and_code_is_read_once) {
  std::mt19937 random(6);
  for (const bool columnwise : {false, true}) {
    const check::Given given(columnwise ? "columnwise" : "rowwise");
    SumsCase c({256, 256}, ElementType::kBF16, nvfp4(false), columnwise, Data::kNormal, random);
    const DeviceBytes x(c.x, 0, "x"), data(c.data, 0, "data"), scale(c.scale, 0, "scale");
    const Array<float> known(std::vector<float>(2, 1.0f), "amax and unit", Access::kReadOnly), result(2 * kSums, "result");
    const auto scratch = workspace<cuda::SumsOfPart>(2);
    SumsProblem p = c.p;
    p.x = x.as(), p.data = data.as(), p.scale = scale.as(), p.unit = p.amax = known.data(), p.result = result.data();
    CHECK_EQ(cuda::launch(p, scratch.data(), nullptr), cudaSuccess);
    CHECK_EQ(x.traffic().read, static_cast<uint64_t>(c.x.size()));
    CHECK_EQ(data.traffic().read, static_cast<uint64_t>(c.data.size()));
    CHECK_EQ(scale.traffic().read, static_cast<uint64_t>(2 * 256 * 256 / 8));
  }
}

TEST(what_no_kernel_serves_is_refused) {
  std::mt19937 random(7);
  SumsCase c({16, 16}, ElementType::kBF16, nvfp4(false), false, Data::kNormal, random);
  SumsProblem p = c.p;
  p.format.block = 24;
  CHECK_EQ(cuda::launch(p, nullptr, nullptr), cudaErrorInvalidValue);
}

// --- vectors

void check_vectors(const std::vector<Scaling>& scalings, int64_t batch, std::mt19937& random) {
  const int64_t formats = static_cast<int64_t>(scalings.size()), tensors = batch * formats;
  std::vector<float> sums(tensors * kSums), known(tensors), channels(tensors * 2 * kChannels);
  for (float& sum : sums) sum = random() % 3 ? 0.0f : static_cast<float>(random() % 1000);
  for (int64_t i = 0; i < tensors; ++i) sums[i * kSums] = 4096;
  if (tensors > 3) std::fill_n(&sums[3 * kSums + kSumsScalesFrom], kSumsScales, 0.0f);  // no scale in use
  for (float& number : known) number = static_cast<float>(random() % 100) / 7;
  for (float& number : channels) number = static_cast<float>(random() % 100);
  const Array<float> sums_there(sums, "sums", Access::kReadOnly), known_there(known, "known", Access::kReadOnly);
  const Array<float> channels_there(channels, "channels", Access::kReadOnly), result(tensors * kVector, "result");
  const float* numbers = known_there.data();
  CHECK_EQ(cuda::launch(cuda::VectorsProblem{tensors, sums_there.data(), numbers, numbers, numbers, channels_there.data(),
                                             scalings.data(), formats, result.data()},
                        nullptr),
           cudaSuccess);
  CHECK_EQ(result.unwritten(), 0u);
  for (int64_t i = 0; i < tensors; ++i) {
    float expected[kVector];
    finish(&sums[i * kSums], {known[i], known[i], known[i], &channels[i * 2 * kChannels]}, scalings[i % formats], expected);
    for (int k = 0; k < kVector; ++k) CHECK_EQ(result[i * kVector + k], expected[k]);
  }
}

TEST(vectors_are_those_of_the_cpu) {
  std::mt19937 random(8);
  const Scaling all[] = {Scaling::kTwoLevel, Scaling::kE8M0, Scaling::kFloat32, Scaling::kTensor, Scaling::kFloat16};
  check_vectors({std::begin(all), std::end(all)}, 3, random);
  std::vector<Scaling> many;
  for (int i = 0; i < 600; ++i) many.push_back(all[random() % 5]);
  check_vectors(many, 2, random);  // more than one launch takes
}

}  // namespace
}  // namespace jaxlowprec
