// What quantisation did to an array, counted by the kernels of every instruction set.
#include "kernel_runs.h"
#include "statistics_reference.h"

namespace jaxlowprec {
namespace {

template <class Problem>
std::vector<double> added_up(const Problem& p, const Buffer& found, int64_t each) {
  std::vector<double> total(p.batch * each);
  for (int64_t i = 0; i < p.batch * p.parts() * each; ++i)
    total[i / (p.parts() * each) * each + i % each] += found.as<float>()[i];
  return total;
}

TEST(moments_and_outliers_are_those_of_the_finite_elements) {
  std::mt19937 random(1);
  for (const Shape shape : shapes())
    for (const ElementType type : kTypes)
      for (const Data data : kAnyData) {
        const check::Given given(name(shape) + " " + name(type) + " " + name(data));
        const int64_t size = shape.rows * shape.columns;
        const Buffer x(2 * size * reference::element_size(type), random() % 2 * 4);
        fill_elements(x.as(), type, 0, size, data, random);
        fill_elements(x.as(), type, size, size, Data::kNormal, random);
        MomentsProblem moments{x.as(), type, 2, size, nullptr};
        const float threshold[] = {1.5f, 0.5f};
        OutliersProblem outliers{x.as(), type, 2, shape.rows, shape.columns, threshold, nullptr};
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Buffer found(2 * moments.parts() * 8), counts(2 * outliers.parts() * shape.columns * 4);
          moments.result = found.as<float>(), outliers.result = counts.as<int32_t>();
          run_chunks(k, moments, scrambled), run_chunks(k, outliers, scrambled);
          for (int64_t b = 0; b < 2; ++b) {
            const ExpectedMoments expected(x.as(), type, shape, b, threshold[b]);
            double found_energy = 0, found_largest = 0;
            std::vector<int> found_beyond(shape.columns);
            for (int64_t part = 0; part < moments.parts(); ++part) {
              const float* of_part = moments.result + 2 * (b * moments.parts() + part);
              found_largest = std::max<double>(found_largest, of_part[0]),
              found_energy += double(of_part[1]) * of_part[1] * moments.size_of(part);
            }
            for (int64_t i = 0; i < outliers.parts() * shape.columns; ++i)
              found_beyond[i % shape.columns] += outliers.result[b * outliers.parts() * shape.columns + i];
            CHECK_EQ(found_largest, expected.largest);
            CHECK(is_near(found_energy, expected.energy, 1e-5));
            CHECK(found_beyond == expected.beyond);
          }
        });
      }
}

TEST(sums_are_those_of_the_elements) {
  std::mt19937 random(2);
  for (const Shape shape : shapes())
    for (const NamedFormat& format : formats())
      for (const bool columnwise : {false, true}) {
        const ElementType type = kTypes[random() % 3];
        const Data kind = kSummable[random() % 5];
        const check::Given given(name(shape) + " " + name(type) + " " + format.name + (columnwise ? " columnwise" : "") +
                                 " " + name(kind));
        SumsCase c(shape, type, format.format, columnwise, kind, random);
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Buffer found(2 * c.p.parts() * kSums * 4);
          c.p.result = found.as<float>();
          run_chunks(k, c.p, scrambled);
          c.check(added_up(c.p, found, kSums));
        });
      }
}

}  // namespace
}  // namespace jaxlowprec
