// The kernels of activations and norms, executed on a CPU: byte for byte the scalar rule, and each byte moved once.
// Kernels: activations.cu norms.cu amax.cu
#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/producers_reference.h"
#include "device_copies.h"

namespace jaxlowprec {
namespace {

using reference::ActivationCase;
using reference::Activations;
using reference::kActivations;
using reference::kAnyData;
using reference::NormCase;
using reference::Norms;

/// A result in the device's memory: all of it is written, and as expected.
void check_result(const DeviceBytes& found, const Buffer& expected, ElementType type) {
  const int64_t count = expected.size() / reference::element_size(type);
  CHECK_EQ(first_difference(found.as(), expected.as(), type, count), -1);
  CHECK_EQ(found.unwritten(), 0);
}

/// Amaxes in the device's memory.
struct Amaxes {
  bool has_plain, has_rotated;
  int64_t batch, rows, columns;
  DeviceBytes plain{batch * 4, 0, "plain"}, rotated{batch * 4, 0, "rotated"};

  ResultAmaxes wanted() const {
    return {has_plain ? plain.as<uint32_t>() : nullptr, has_rotated ? rotated.as<uint32_t>() : nullptr, kDefaultSignMask};
  }
  void check(const Buffer& y, ElementType type) const {
    const auto of = [&](int64_t b, bool turned) {
      return reference::amax_of_result(y.as(), type, rows, columns, b, turned);
    };
    for (int64_t b = 0; b < batch; ++b) {
      if (has_plain) CHECK_EQ(plain.as<uint32_t>()[b], of(b, false));
      if (has_rotated) CHECK_EQ(rotated.as<uint32_t>()[b], of(b, true));
    }
  }
};

void check_activation(const ActivationCase& c, const Activations& a, int64_t misalignment) {
  const check::Given given(c.text() + " misaligned by " + std::to_string(misalignment));
  const int64_t bytes = a.x.size();
  const DeviceBytes x(a.x, misalignment, "x"), up(a.up, misalignment, "up"), dy(a.dy, misalignment, "dy");
  const DeviceBytes y(bytes, misalignment, "y"), dx(bytes, misalignment, "dx"), dup(bytes, misalignment, "dup");
  const void* const gate = c.gated ? up.as() : nullptr;
  CHECK_EQ(cuda::launch(ActivationProblem{x.as(), gate, c.type, 1, c.size, c.kind, y.as()}, nullptr), cudaSuccess);
  check_result(y, a.y, c.type);
  CHECK_EQ(x.traffic().read, static_cast<uint64_t>(bytes));
  const ActivationGradientProblem p{dy.as(), x.as(), gate, c.type, 1, c.size, c.kind, dx.as(), c.gated ? dup.as() : nullptr};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  check_result(dx, a.dx, c.type);
  if (c.gated) check_result(dup, a.dup, c.type);
  CHECK_EQ(dy.traffic().read, static_cast<uint64_t>(bytes));
  CHECK_EQ(x.traffic().read, static_cast<uint64_t>(2 * bytes));
}

TEST(activations_follow_the_rule) {
  std::mt19937 random(1);
  for (const int64_t size : {1, 7, 33, 4096, 4100, 20000})
    for (const ElementType type : kTypes)
      for (const ActivationKind kind : kActivations)
        for (const bool gated : {false, true}) {
          const ActivationCase c{kind, type, size, gated, kAnyData[random() % 6]};
          cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;
          check_activation(c, Activations(c, random), random() % 3 ? 0 : 4);
        }
}

TEST(activations_give_the_amaxes_of_their_results) {
  std::mt19937 random(8);
  struct Shape {
    int64_t batch, rows, columns;
  };
  for (const Shape s : {Shape{1, 1, 1}, {2, 16, 128}, {3, 19, 33}, {2, 35, 300}, {1, 17, 2104}, {2, 130, 7}, {1, 64, 264}})
    for (const ElementType type : kTypes)
      for (const bool gated : {false, true}) {
        const int64_t size = s.rows * s.columns;
        const ActivationKind kind = kActivations[random() % 3];
        const ActivationCase c{kind, type, s.batch * size, gated, kAnyData[random() % 6]};
        const check::Given given(std::to_string(s.rows) + "x" + std::to_string(s.columns) + " " + c.text());
        const Activations a(c, random);
        const int64_t bytes = a.x.size(), misalignment = random() % 3 ? 0 : 4;
        const DeviceBytes x(a.x, misalignment, "x"), up(a.up, misalignment, "up"), dy(a.dy, misalignment, "dy");
        const DeviceBytes y(bytes, misalignment, "y"), dx(bytes, misalignment, "dx"), dup(bytes, misalignment, "dup");
        const bool has_plain = random() % 2, has_rotated = !has_plain || random() % 2;
        const Amaxes of_y{has_plain, has_rotated, s.batch, s.rows, s.columns};
        const Amaxes of_dx{has_plain, has_rotated, s.batch, s.rows, s.columns};
        const Amaxes of_dup{has_plain, has_rotated, s.batch, s.rows, s.columns};
        const void* const gate = gated ? up.as() : nullptr;
        cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;
        vary_order(random);
        const ActivationProblem p{x.as(), gate, type, s.batch, size, kind, y.as(), s.columns, of_y.wanted()};
        CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
        check_result(y, a.y, type);
        of_y.check(a.y, type);
        ActivationGradientProblem g{dy.as(), x.as(),  gate,    type,      s.batch,        size,
                                    kind,    dx.as(), nullptr, s.columns, of_dx.wanted(), {}};
        if (gated) g.dup = dup.as(), g.of_dup = of_dup.wanted();
        CHECK_EQ(cuda::launch(g, nullptr), cudaSuccess);
        check_result(dx, a.dx, type);
        of_dx.check(a.dx, type);
        CHECK_EQ(x.traffic().read, static_cast<uint64_t>(2 * bytes));  // and no result is read again
        for (const DeviceBytes* result : {&y, &dx, &dup}) CHECK_EQ(result->traffic().read, uint64_t{0});
        if (!gated) continue;
        check_result(dup, a.dup, type);
        of_dup.check(a.dup, type);
      }
}

TEST(activations_of_every_bit_pattern) {
  std::mt19937 random(2);
  for (const ElementType type : {ElementType::kBF16, ElementType::kF16})
    for (const ActivationKind kind : kActivations) {
      const ActivationCase c{kind, type, 1 << 16, true, Data::kNormal};
      Buffer x(c.size * 2);
      for (int64_t i = 0; i < c.size; ++i) x.as<uint16_t>()[i] = static_cast<uint16_t>(i);
      check_activation(c, Activations(c, std::move(x), random), 0);
    }
}

// --- norms

/// kept: whether rows stay in the shared memory.
void check_norm(const Norms& n, int64_t misalignment, bool kept = true) {
  const NormCase& c = n.c;
  const check::Given given(c.text() + " misaligned by " + std::to_string(misalignment));
  const uint64_t bytes = n.x.size(), times = kept ? 1 : c.layer() ? 3 : 2;
  const DeviceBytes x(n.x, misalignment, "x"), residual(n.residual, misalignment, "residual");
  const DeviceBytes weight(n.weight, 0, "weight"), beta(n.beta, 0, "beta");
  const DeviceBytes y(bytes, misalignment, "y"), total(bytes, misalignment, "total");
  const DeviceBytes mean(n.mean.size(), 0, "mean"), inverse(n.inverse.size(), 0, "inverse");
  NormProblem p = n.problem();
  p.x = x.as(), p.weight = weight.as<float>(), p.result = y.as(), p.inverse = inverse.as<float>();
  if (c.has_residual) p.residual = residual.as(), p.total = total.as();
  if (c.has_beta) p.beta = beta.as<float>();
  if (c.layer()) p.mean = mean.as<float>();
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  check_result(y, n.y, c.type);
  check_result(inverse, n.inverse, ElementType::kF32);
  if (c.has_residual) check_result(total, n.total, c.type);
  if (c.layer()) check_result(mean, n.mean, ElementType::kF32);
  CHECK_EQ(x.traffic().read, bytes * times);
  CHECK_EQ(residual.traffic().read, c.has_residual ? bytes * times : 0);
}

void check_gradient(const Norms& n, int64_t misalignment, bool kept = true) {
  const NormCase& c = n.c;
  const check::Given given(c.text() + " gradient, misaligned by " + std::to_string(misalignment));
  const uint64_t bytes = n.x.size(), times = kept ? 1 : 2;
  const DeviceBytes dy(n.dy, misalignment, "dy"), of_total(n.of_total, misalignment, "of_total");
  const DeviceBytes x(n.total, misalignment, "x"), dx(bytes, misalignment, "dx"), weight(n.weight, 0, "weight");
  const DeviceBytes mean(n.mean, 0, "mean"), inverse(n.inverse, 0, "inverse");
  NormGradientProblem p = n.gradient_problem();
  p.dy = dy.as(), p.x = x.as(), p.weight = weight.as<float>(), p.inverse = inverse.as<float>(), p.dx = dx.as();
  if (c.has_residual) p.of_total = of_total.as();
  if (c.layer()) p.mean = mean.as<float>();
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  check_result(dx, n.dx, c.type);
  CHECK_EQ(x.traffic().read, bytes * times);
  CHECK_EQ(dy.traffic().read, bytes * times);
  CHECK_EQ(of_total.traffic().read, c.has_residual ? bytes : 0);
}

/// Pieces of 16 bytes and single elements; parts of a warp's first load, of a turn of its loop, of a block.
TEST(norms_follow_the_rule) {
  std::mt19937 random(3);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : kTypes)
      for (const int64_t columns : {1, 5, 8, 96, 255, 256, 264, 520, 700, 1024, 1032, 4096})
        for (const bool has_residual : {false, true}) {
          const int64_t rows = columns < 300 ? 7 : 3;
          const bool has_beta = kind == NormKind::kLayer && random() % 2;
          const Norms n({kind, type, 2, rows, columns, has_residual, has_beta, kAnyData[random() % 6]}, random);
          vary_order(random);
          check_norm(n, random() % 3 ? 0 : 4);
          check_gradient(n, random() % 3 ? 0 : 4);
        }
}

TEST(norms_give_the_amaxes_of_their_results) {
  std::mt19937 random(9);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : kTypes)
      for (const int64_t columns : {1, 33, 264, 1032, 6152})
        for (const int64_t rows : {3, 16, 35}) {
          const Norms n({kind, type, 2, rows, columns, false, false, kAnyData[random() % 6]}, random);
          const check::Given given(n.c.text());
          const DeviceBytes x(n.x, 0, "x"), weight(n.weight, 0, "weight"), y(n.y.size(), 0, "y");
          const DeviceBytes mean(n.mean.size(), 0, "mean"), inverse(n.inverse.size(), 0, "inverse");
          const bool has_plain = random() % 2;
          const Amaxes amaxes{has_plain, !has_plain || random() % 2, 2, rows, columns};
          NormProblem p = n.problem();
          p.x = x.as(), p.weight = weight.as<float>(), p.result = y.as(), p.inverse = inverse.as<float>();
          if (n.c.layer()) p.mean = mean.as<float>();
          p.amaxes = amaxes.wanted();
          vary_order(random);
          CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
          check_result(y, n.y, type);
          amaxes.check(n.y, type);
        }
}

TEST(rows_that_do_not_fit_are_read_again) {
  std::mt19937 random(4);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : {ElementType::kBF16, ElementType::kF32})
      for (const int64_t odd : {0, 1}) {
        const int64_t bytes = reference::element_size(type), columns = 48 * 1024 / bytes + 8 + odd;
        check_norm(Norms({kind, type, 1, 2, columns, true, false, Data::kNormal}, random), 0, false);
        check_gradient(Norms({kind, type, 1, 2, columns / 2, true, false, Data::kNormal}, random), 0, false);
      }
}

/// As many warps a block as keep their rows.
TEST(wide_rows_share_a_block_with_fewer) {
  std::mt19937 random(5);
  for (const int64_t columns : {6144, 6152, 12288, 12296, 24576}) {
    const Norms n({NormKind::kRms, ElementType::kBF16, 1, 5, columns, false, false, Data::kNormal}, random);
    check_norm(n, 0);
    check_gradient(n, 0, columns <= 12288);
  }
}

TEST(means_of_negative_zeros_are_zero) {
  std::mt19937 random(6);
  for (const ElementType type : kTypes)
    for (const int64_t columns : {256, 264})
      check_norm(Norms({NormKind::kLayer, type, 1, 2, columns, false, false, Data::kNegativeZero}, random), 0);
}

TEST(nothing_is_launched_for_nothing) {
  NormProblem norm{};
  norm.batch = 1, norm.columns = 8;
  CHECK_EQ(cuda::launch(norm, nullptr), cudaSuccess);
  CHECK_EQ(cuda::launch(NormGradientProblem{}, nullptr), cudaSuccess);
  CHECK_EQ(cuda::launch(ActivationProblem{}, nullptr), cudaSuccess);
  CHECK_EQ(cuda::launch(ActivationGradientProblem{}, nullptr), cudaSuccess);
}

TEST(indices_pass_two_to_the_31) {
  std::mt19937 random(7);
  constexpr int64_t kColumns = 1 << 12, kRows = (int64_t{1} << 19) + 4, kLast = (kRows - 4) * kColumns;
  const Norms n({NormKind::kRms, ElementType::kBF16, 1, 4, kColumns, false, false, Data::kNormal}, random);
  const auto x = cuda_on_cpu::Array<uint16_t>::zeros(kRows * kColumns, "x");
  const cuda_on_cpu::Array<uint16_t> y(kRows * kColumns, "y");
  const cuda_on_cpu::Array<float> inverse(kRows, "inverse");
  const DeviceBytes weight(n.weight, 0, "weight");
  std::memcpy(&x[kLast], n.x.as(), n.x.size());
  NormProblem p = n.problem();
  p.rows = kRows, p.x = x.data(), p.weight = weight.as<float>(), p.result = y.data(), p.inverse = inverse.data();
  cuda_on_cpu::options().only_blocks = {dim3(kRows / 4 - 1, 0, 0)};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(first_difference(&y[kLast], n.y.as(), ElementType::kBF16, 4 * kColumns), -1);

  // The last tile of the activation, of 4096 elements.
  const int64_t size = kLast + 4096;
  const ActivationCase c{ActivationKind::kSilu, ElementType::kBF16, 4096, false, Data::kNormal};
  const Activations a(c, random);
  std::memcpy(&x[kLast], a.x.as(), a.x.size());
  cuda_on_cpu::device().resident_blocks = 1 << 20;  // a block for each tile
  ++cuda_on_cpu::device().index;
  cuda_on_cpu::options().only_blocks = {dim3(static_cast<unsigned>(size / 4096 - 1), 0, 0)};
  CHECK_EQ(cuda::launch(ActivationProblem{x.data(), nullptr, c.type, 1, size, c.kind, y.data()}, nullptr), cudaSuccess);
  cuda_on_cpu::options().only_blocks = {};
  cuda_on_cpu::device().resident_blocks = 0;
  CHECK_EQ(first_difference(&y[kLast], a.y.as(), ElementType::kBF16, 4096), -1);
}

}  // namespace
}  // namespace jaxlowprec
