// The kernels of activations and norms, executed on a CPU: byte for byte the scalar rule, and each byte moved once.
// Kernels: activations.cu norms.cu norm_gradient.cu sum_over_rows.cu
#include "../../xla_ffi/cuda/launch.h"
#include "../../xla_ffi/cuda/producers/norm_parts.h"
#include "device_norm.h"

namespace jaxlowprec {
namespace {

using reference::ActivationCase;
using reference::Activations;
using reference::kActivations;
using reference::kAnyData;
using reference::NormCase;
using reference::Norms;

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

/// Adds up the sums of parts of a gradient, the `which`-th, which a problem has left.
void check_sums(const ActivationGradientProblem& g, const Buffer& gradient, int which) {
  const DeviceBytes sums(4 * g.batch * g.columns, 0, "sums");
  const AddPartsProblem add{g.sums + which * g.columns, g.sums_each(), g.batch, g.parts(), g.columns, sums.as<float>()};
  CHECK_EQ(cuda::launch(add, nullptr), cudaSuccess);
  check_result(sums, reference::sums_over_rows(gradient, g.type, g.batch, g.rows(), g.columns), ElementType::kF32);
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
        const ActivationKind kind = kActivations[random() % std::size(kActivations)];
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
        const DeviceBytes parts(4 * s.batch * g.parts() * g.sums_each(), 0, "sums of parts");
        const bool has_sums = random() % 2;
        if (has_sums) g.sums = parts.as<float>();
        CHECK_EQ(cuda::launch(g, nullptr), cudaSuccess);
        if (has_sums) {
          CHECK_EQ(parts.unwritten(), 0);
          check_sums(g, a.dx, 0);
          if (gated) check_sums(g, a.dup, 1);
        }
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

/// Rows as kernels take them whose blocks keep what shared memory has room for (norm_launch.h): in pieces of 16 bytes, or of
/// an element. A block has `lines` rows of arrays, and `fixed` bytes beside.
struct CutRows {
  int64_t piece, count, kept;

  CutRows(const NormCase& c, int64_t misalignment, int64_t lines, int64_t fixed) {
    const int64_t bytes = reference::element_size(c.type), row = c.columns * bytes;
    piece = row % 16 == 0 && misalignment == 0 ? 16 : bytes, count = row / piece;
    const auto fit = [&](int64_t memory) {
      const int64_t pieces = (memory - fixed) / (lines * piece);
      return pieces < count ? pieces / 32 * 32 : count;
    };
    kept = fit(cuda_on_cpu::device().shared_per_multiprocessor() / 2 - 1024);
    if (4 * kept < 3 * count) kept = fit(cuda_on_cpu::device().shared_per_block_limit());
  }

  int64_t bytes_left() const { return (count - kept) * piece; }  // of a row
};

/// kept: whether rows stay in the shared memory.
void check_norm(const Norms& n, int64_t misalignment, bool kept = true) {
  const check::Given given(n.c.text() + " misaligned by " + std::to_string(misalignment));
  const DeviceNorm arrays{n, misalignment};
  CHECK_EQ(cuda::launch(arrays.problem(), nullptr), cudaSuccess);
  arrays.check(kept ? 0 : n.x.size() * (n.c.layer() ? 2 : 1));
}

void check_gradient(const Norms& n, int64_t misalignment) {
  const NormCase& c = n.c;
  const check::Given given(c.text() + " gradient, misaligned by " + std::to_string(misalignment));
  const uint64_t bytes = n.x.size();
  const DeviceBytes dy(n.dy, misalignment, "dy"), of_total(n.of_total, misalignment, "of_total");
  const DeviceBytes x(n.total, misalignment, "x"), dx(bytes, misalignment, "dx"), weight(n.weight, 0, "weight");
  const DeviceBytes mean(n.mean, 0, "mean"), inverse(n.inverse, 0, "inverse");
  NormGradientProblem p = n.gradient_problem();
  p.dy = dy.as(), p.x = x.as(), p.weight = weight.as<float>(), p.inverse = inverse.as<float>(), p.dx = dx.as();
  if (c.has_residual) p.of_total = of_total.as();
  if (c.layer()) p.mean = mean.as<float>();
  p.has_beta = c.has_beta;
  const cuda::NormGradientParts parts(c.batch, c.rows);
  const int64_t sums = c.batch * parts.count * p.sums_each();
  const DeviceBytes workspace(4 * sums, 0, "workspace");
  p.sums = workspace.as<float>();
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  check_result(dx, n.dx, c.type);
  CHECK_EQ(workspace.unwritten(), 0);
  // Rows are finished two at a time; of an odd number the last one is taken twice.
  const uint64_t finished = c.batch * ((c.rows + 1) / 2 * 2);
  const uint64_t again = finished * CutRows(c, misalignment, 16, 128).bytes_left();
  CHECK_EQ(x.traffic().read, bytes + again);
  CHECK_EQ(dy.traffic().read, bytes + again);
  CHECK_EQ(of_total.traffic().read, c.has_residual ? finished * (bytes / c.lines()) : 0);
  for (const bool of_beta : {false, true}) {
    if (of_beta && !c.has_beta) continue;
    const DeviceBytes added(4 * c.batch * c.columns, 0, "sums");
    const float* found = p.sums + (of_beta ? c.columns : 0);
    const AddPartsProblem add{found, p.sums_each(), c.batch, parts.count, c.columns, added.as<float>()};
    CHECK_EQ(cuda::launch(add, nullptr), cudaSuccess);
    CHECK_EQ(added.unwritten(), 0);
    reference::check_sums(n, added.as<float>(), of_beta);
  }
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

/// A norm whose amaxes are wanted. x is read once, but for what a block does not keep.
void check_amaxed_norm(const Norms& n, const Amaxes& amaxes, int64_t misalignment) {
  const NormCase& c = n.c;
  const check::Given given(c.text() + " with amaxes, misaligned by " + std::to_string(misalignment));
  const CutRows row(c, misalignment, 16, 256);
  const DeviceNorm arrays{n, misalignment};
  NormProblem p = arrays.problem();
  p.amaxes = amaxes.wanted();
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  // Squares of a row are added once more where its last turn is not kept whole: a lane's four pieces, or eight elements.
  const int64_t turn = row.piece == 16 ? 128 : 256, turned = row.kept == row.count ? row.count : row.kept / turn * turn;
  const int64_t of_squares = c.layer() ? (row.count - turned) * row.piece * c.lines() : 0;
  // Pairs of columns beyond what is kept are read once more, 16 rows of them whether they exist or not.
  const int64_t rows = c.batch * ((c.rows + 15) / 16 * 16);
  arrays.check(static_cast<uint64_t>(of_squares + row.bytes_left() * rows));
  amaxes.check(n.y, c.type);
}

TEST(norms_give_the_amaxes_of_their_results) {
  std::mt19937 random(9);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : kTypes)
      for (const int64_t columns : {1, 2, 33, 264, 1032, 2310, 6152})
        for (const int64_t rows : {1, 3, 16, 35}) {
          const bool has_beta = kind == NormKind::kLayer && random() % 2;
          const Norms n({kind, type, 2, rows, columns, random() % 3 == 0, has_beta, kAnyData[random() % 6]}, random);
          const bool has_plain = random() % 3;
          vary_order(random);
          check_amaxed_norm(n, {has_plain, !has_plain || random() % 3, 2, rows, columns}, random() % 3 ? 0 : 4);
        }
}

/// Rows of which a block keeps what lets a multiprocessor hold two, or all that it can have.
TEST(long_rows_give_the_amaxes_of_their_results) {
  std::mt19937 random(10);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : {ElementType::kBF16, ElementType::kF32})
      for (const int64_t columns : {3712, 3717, 4096, 8200, 8202, 16392}) {
        const Norms n({kind, type, 1, 17, columns, random() % 2 == 0, false, kAnyData[random() % 6]}, random);
        vary_order(random);
        check_amaxed_norm(n, {true, true, 1, 17, columns}, 0);
      }
}

/// Blocks of 16 rows are of one matrix each: those of many matrices of few rows.
TEST(amaxes_of_many_matrices) {
  std::mt19937 random(11);
  for (const ElementType type : kTypes) {
    const Norms n({NormKind::kRms, type, 9, 20, 40, false, false, Data::kNormal}, random);
    check_amaxed_norm(n, {true, true, 9, 20, 40}, 0);
  }
}

/// Parts of eight rows and of several turns of eight, the last one short.
TEST(gradients_of_many_rows) {
  std::mt19937 random(12);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const int64_t columns : {5, 24})
      for (const int64_t batch : {1, 3, 600}) {
        const int64_t rows = batch == 600 ? 19 : batch == 3 ? 1500 : 4099;
        const ElementType type = kTypes[random() % 3];
        const bool has_beta = kind == NormKind::kLayer;
        const Norms n({kind, type, batch, rows, columns, random() % 2 == 0, has_beta, Data::kNormal}, random);
        vary_order(random);
        check_gradient(n, random() % 3 ? 0 : 4);
      }
}

/// The sums of a shape have one order, whatever the device has.
TEST(parts_depend_on_the_shape_alone) {
  const auto parts = [](int64_t batch, int64_t rows) {
    const cuda::NormGradientParts found(batch, rows);
    return std::make_pair(found.rows_each, found.count);
  };
  CHECK(parts(1, 8192) == std::make_pair(int64_t{16}, int64_t{512}));
  CHECK(parts(1, 2048) == std::make_pair(int64_t{8}, int64_t{256}));
  CHECK(parts(1, 1) == std::make_pair(int64_t{8}, int64_t{1}));
  CHECK(parts(1, 0).second == 0);
  CHECK(parts(1, 4097) == std::make_pair(int64_t{16}, int64_t{257}));
  CHECK(parts(1024, 100) == std::make_pair(int64_t{104}, int64_t{1}));
}

TEST(rows_that_do_not_fit_are_read_again) {
  std::mt19937 random(4);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : {ElementType::kBF16, ElementType::kF32})
      for (const int64_t odd : {0, 1}) {
        const int64_t bytes = reference::element_size(type), columns = 48 * 1024 / bytes + 8 + odd;
        const Norms n({kind, type, 1, 2, columns, true, false, Data::kNormal}, random);
        check_norm(n, 0, false);
        check_gradient(n, 0);
      }
}

/// As many warps a block as keep their rows.
TEST(wide_rows_share_a_block_with_fewer) {
  std::mt19937 random(5);
  for (const int64_t columns : {6144, 6152, 12288, 12296, 24576})
    check_norm(Norms({NormKind::kRms, ElementType::kBF16, 1, 5, columns, false, false, Data::kNormal}, random), 0);
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
  const auto inverse = cuda_on_cpu::Array<float>::zeros(kRows, "inverse");
  const DeviceBytes weight(n.weight, 0, "weight");
  std::memcpy(&x[kLast], n.x.as(), n.x.size());
  NormProblem p = n.problem();
  p.rows = kRows, p.x = x.data(), p.weight = weight.as<float>(), p.result = y.data(), p.inverse = inverse.data();
  cuda_on_cpu::options().only_blocks = {dim3(kRows / 4 - 1, 0, 0)};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(first_difference(&y[kLast], n.y.as(), ElementType::kBF16, 4 * kColumns), -1);

  // The last block with amaxes, of four rows.
  const Amaxes amaxes{true, true, 1, 4, kColumns};
  p.amaxes = amaxes.wanted();
  cuda_on_cpu::options().only_blocks = {dim3(kRows / 16, 0, 0)};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(first_difference(&y[kLast], n.y.as(), ElementType::kBF16, 4 * kColumns), -1);
  amaxes.check(n.y, ElementType::kBF16);

  // The last part of the gradient.
  const Norms twice({NormKind::kRms, ElementType::kBF16, 1, 4, kColumns, false, false, Data::kNormal}, random);
  std::memcpy(&x[kLast], twice.x.as(), twice.x.size());
  std::memcpy(&inverse[kRows - 4], twice.inverse.as(), twice.inverse.size());
  const auto dy = cuda_on_cpu::Array<uint16_t>::zeros(kRows * kColumns, "dy");
  std::memcpy(&dy[kLast], twice.dy.as(), twice.dy.size());
  const DeviceBytes its_weight(twice.weight, 0, "weight");
  const cuda::NormGradientParts parts(1, kRows);
  const cuda_on_cpu::Array<float> sums(parts.count * kColumns, "sums");
  NormGradientProblem g = twice.gradient_problem();
  g.rows = kRows, g.dy = dy.data(), g.x = x.data(), g.weight = its_weight.as<float>(), g.inverse = inverse.data();
  g.dx = y.data(), g.sums = sums.data();
  cuda_on_cpu::options().only_blocks = {dim3(static_cast<unsigned>(parts.count - 1), 0, 0)};
  CHECK_EQ(cuda::launch(g, nullptr), cudaSuccess);
  CHECK_EQ(first_difference(&y[kLast], twice.dx.as(), ElementType::kBF16, 4 * kColumns), -1);

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
