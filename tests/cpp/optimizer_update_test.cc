// AdamW's and Lion's update of every instruction set: the bytes of its definition, whatever is kept in which way.
#include "kernel_runs.h"
#include "optimizer_data.h"

namespace jaxlowprec {
namespace {

struct Size {
  int64_t batch, rows, columns;
};

void check_against_reference(const UpdateVariant& variant, Size size, Data data, std::mt19937& random) {
  const check::Given given(variant.name() + " of " + std::to_string(size.batch) + ", " + std::to_string(size.rows) + ", " +
                           std::to_string(size.columns) + " data " + std::to_string(static_cast<int>(data)));
  const UpdateData before(variant, size.batch, size.rows, size.columns, data, random);
  UpdateData expected = before;
  reference::optimizer_update(expected.problem());
  for_all_runs([&](const Kernels& k, bool scrambled) {
    UpdateData found = before;
    run_chunks(k, found.problem(), scrambled);
    check_results(found, expected);
  });
}

TEST(every_variant_has_the_bytes_of_its_definition) {
  std::mt19937 random(1);
  for (const UpdateVariant& variant : update_variants()) {
    if (kReduced && random() % 4) continue;
    check_against_reference(variant, {1, 3, 96}, Data::kNormal, random);
    check_against_reference(variant, {2, 3, 104}, Data::kSparse, random);
  }
}

TEST(every_size_of_rows) {
  std::mt19937 random(2);
  const std::vector<UpdateVariant> variants = update_variants();
  for (const int64_t columns : {1, 8, 31, 32, 33, 63, 64, 100, 129, 300, 511, 512, 513, 1100})
    for (int i = 0; i < (kReduced ? 2 : 12); ++i)
      check_against_reference(variants[random() % variants.size()], {1, 1 + static_cast<int64_t>(random() % 5), columns},
                              Data::kNormal, random);
}

TEST(hostile_numbers) {
  std::mt19937 random(3);
  const std::vector<UpdateVariant> variants = update_variants();
  for (const Data data :
       {Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity, Data::kNegativeZero, Data::kAnyBits, Data::kExponents})
    for (int i = 0; i < (kReduced ? 3 : 40); ++i)
      check_against_reference(variants[random() % variants.size()], {1, 4, 160}, data, random);
}

/// With these scalars the update is m / k1: fast kernels divide by a number that they know in another way.
TEST(quotients_are_those_of_true_divisions) {
  std::mt19937 random(5);
  constexpr int kSome = kReduced ? 1 << 10 : 1 << 16;
  std::vector<float> zero(kSome, 0.0f), m(kSome), v(kSome), update(kSome);
  for (int i = 0; i < (kReduced ? 8 : 200); ++i) {
    const uint32_t fraction = i % 4 ? random() & 0x7FFFFF : i % 8 ? 0x7FFFFE - random() % 64 : random() % 64;
    const float k1 = Lanes<float>::from_bits((127 - random() % 12) << 23 | fraction);
    const float scalars[] = {1, 0, 1, 0, k1, 1, 0, 0, 1};
    for (float& each : m) each = Lanes<float>::from_bits((random() & 0x807FFFFF) | (117 + random() % 20) << 23);
    for_all_runs([&](const Kernels& k, bool scrambled) {
      std::fill(v.begin(), v.end(), 1.0f);
      std::vector<float> new_m(m);
      OptimizerUpdateProblem p{};
      p.batch = 1, p.rows = 1, p.columns = kSome, p.g = zero.data(), p.g_type = ElementType::kF32;
      p.weight = WeightKind::kFloat32, p.p = zero.data(), p.update = update.data(), p.scalars = scalars;
      p.mu.numbers = p.mu.new_numbers = new_m.data(), p.nu.numbers = p.nu.new_numbers = v.data();
      run_chunks(k, p, scrambled);
      int wrong = 0;
      for (int j = 0; j < kSome; ++j) wrong += update[j] != m[j] / k1;
      CHECK_EQ(wrong, 0);
    });
  }
}

TEST(more_than_one_chunk) {
  std::mt19937 random(4);
  constexpr auto kStochastic = MomentKind::kStochastic, kFloat32 = MomentKind::kFloat32;
  const int64_t rows = kSanitized || kReduced ? 33 : 70;
  check_against_reference({ElementType::kBF16, WeightKind::kRest16, kStochastic, kStochastic, false}, {1, rows, 1037},
                          Data::kNormal, random);
  check_against_reference({ElementType::kF32, WeightKind::kFloat32, kFloat32, kFloat32, false}, {1, rows, 1037},
                          Data::kNormal, random);
  check_against_reference({ElementType::kBF16, WeightKind::kRest8, kStochastic, MomentKind::kNone, false, UpdateRule::kLion},
                          {1, rows, 1037}, Data::kNormal, random);
  check_against_reference({ElementType::kBF16, WeightKind::kDrawn, MomentKind::kNearest, kFloat32, true}, {2, rows, 1024},
                          Data::kNormal, random);
}

}  // namespace
}  // namespace jaxlowprec
