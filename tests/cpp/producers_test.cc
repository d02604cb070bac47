// Activations and norms: the kernels of every instruction set have the bits of scalar code that follows numerics.md 12.
#include <array>

#include "kernel_runs.h"
#include "producers_reference.h"
#include "quantize_cases.h"

namespace jaxlowprec {
namespace {

using reference::ActivationCase;
using reference::Activations;
using reference::kActivations;
using reference::kAnyData;
using reference::NormCase;
using reference::Norms;

/// Room for the amaxes of the matrices of a result (numerics.md 1 and 3).
struct Amaxes {
  Buffer plain, rotated;
  bool has_plain, has_rotated;

  Amaxes(int64_t batch, bool has_plain, bool has_rotated)
      : plain(batch * 4), rotated(batch * 4), has_plain(has_plain), has_rotated(has_rotated) {
    std::fill_n(plain.as<uint32_t>(), batch, 0), std::fill_n(rotated.as<uint32_t>(), batch, 0);
  }

  ResultAmaxes wanted() const {
    return {has_plain ? plain.as<uint32_t>() : nullptr, has_rotated ? rotated.as<uint32_t>() : nullptr, kDefaultSignMask};
  }

  void check(const Buffer& y, ElementType type, int64_t batch, int64_t rows, int64_t columns) const {
    const auto of = [&](int64_t b, bool turned) {
      return reference::amax_of_result(y.as(), type, rows, columns, b, turned);
    };
    for (int64_t b = 0; b < batch; ++b) {
      if (has_plain) CHECK_EQ(plain.as<uint32_t>()[b], of(b, false));
      if (has_rotated) CHECK_EQ(rotated.as<uint32_t>()[b], of(b, true));
    }
  }
};

/// Adds up the sums of parts of gradients, which a problem has left.
void check_sums(const Kernels& k, const ActivationGradientProblem& g, std::array<const Buffer*, 2> gradients,
                bool scrambled) {
  for (int i = 0; i < 2 && gradients[i]; ++i) {
    const Buffer sums(4 * g.batch * g.columns);
    const AddPartsProblem add{g.sums + i * g.columns, g.sums_each(), g.batch, g.parts(), g.columns, sums.as<float>()};
    run_chunks(k, add, scrambled);
    const Buffer expected = reference::sums_over_rows(*gradients[i], g.type, g.batch, g.rows(), g.columns);
    CHECK_EQ(first_difference(sums, expected, ElementType::kF32), -1);
  }
}

TEST(rows_are_summed_in_order) {
  std::mt19937 random(14);
  struct Shape {
    int64_t batch, rows, columns;
  };
  for (const Shape s : {Shape{1, 1, 1}, {2, 16, 128}, {3, 19, 33}, {2, 64, 40}, {1, 65, 4200}, {2, 130, 7}, {1, 1100, 9}})
    for (const ElementType type : kTypes)
      for (const Data data : kAnyData) {
        const check::Given given(std::to_string(s.rows) + "x" + std::to_string(s.columns) + " " + name(type));
        const Buffer x = reference::filled(type, s.batch * s.rows * s.columns, data, random);
        const Buffer expected = reference::sums_over_rows(x, type, s.batch, s.rows, s.columns);
        for_all_runs([&](const Kernels& k, bool scrambled) {
          SumOverRowsProblem p{x.as(), type, s.batch, s.rows, s.columns};
          const Buffer parts(4 * s.batch * p.parts() * s.columns), sums(4 * s.batch * s.columns);
          p.sums = parts.as<float>();
          run_chunks(k, p, scrambled);
          const AddPartsProblem add{p.sums, s.columns, s.batch, p.parts(), s.columns, sums.as<float>()};
          run_chunks(k, add, scrambled);
          CHECK_EQ(first_difference(sums, expected, ElementType::kF32), -1);
        });
      }
}

TEST(activations_give_the_amaxes_of_their_results) {
  std::mt19937 random(4);
  struct Shape {
    int64_t batch, rows, columns;
  };
  for (const Shape s : {Shape{1, 1, 1}, {2, 16, 128}, {3, 19, 33}, {2, 35, 300}, {1, 17, 4200}, {2, 130, 7}})
    for (const ElementType type : kTypes)
      for (const ActivationKind kind : kActivations)
        for (const bool gated : {false, true}) {
          if (kReduced && random() % 4) continue;
          const int64_t size = s.rows * s.columns;
          const ActivationCase c{kind, type, s.batch * size, gated, kAnyData[random() % 6]};
          const check::Given given(std::to_string(s.rows) + "x" + std::to_string(s.columns) + " " + c.text());
          const Activations a(c, random);
          const int which = 1 + static_cast<int>(random() % 3);
          const bool has_sums = random() % 2;
          for_all_runs([&](const Kernels& k, bool scrambled) {
            const Buffer y(a.y.size()), dx(a.y.size()), dup(a.y.size());
            const Amaxes of_y(s.batch, which & 1, which & 2), of_dx(s.batch, which & 1, which & 2);
            const Amaxes of_dup(s.batch, which & 1, which & 2);
            const void* const up = gated ? a.up.as() : nullptr;
            const ActivationProblem p{a.x.as(), up, type, s.batch, size, kind, y.as(), s.columns, of_y.wanted()};
            run_chunks(k, p, scrambled);
            CHECK_EQ(first_difference(y, a.y, type), -1);
            of_y.check(y, type, s.batch, s.rows, s.columns);
            ActivationGradientProblem g{a.dy.as(), a.x.as(), up,      type,      s.batch,        size,
                                        kind,      dx.as(),  nullptr, s.columns, of_dx.wanted(), {}};
            if (gated) g.dup = dup.as(), g.of_dup = of_dup.wanted();
            const Buffer parts(4 * s.batch * g.parts() * g.sums_each());
            if (has_sums) g.sums = parts.as<float>();
            run_chunks(k, g, scrambled);
            if (has_sums) check_sums(k, g, {&a.dx, gated ? &a.dup : nullptr}, scrambled);
            CHECK_EQ(first_difference(dx, a.dx, type), -1);
            of_dx.check(dx, type, s.batch, s.rows, s.columns);
            if (!gated) return;
            CHECK_EQ(first_difference(dup, a.dup, type), -1);
            of_dup.check(dup, type, s.batch, s.rows, s.columns);
          });
        }
}

TEST(activations_follow_the_rule) {
  std::mt19937 random(1);
  for (const int64_t size : {1, 7, 16, 33, 1000, 20000})
    for (const ElementType type : kTypes)
      for (const ActivationKind kind : kActivations)
        for (const bool gated : {false, true}) {
          const ActivationCase c{kind, type, size, gated, kAnyData[random() % 6]};
          const check::Given given(c.text());
          const Activations a(c, random);
          for_all_runs([&](const Kernels& k, bool scrambled) {
            const Buffer y(a.y.size()), dx(a.y.size()), dup(a.y.size());
            const void* const up = gated ? a.up.as() : nullptr;
            run_chunks(k, ActivationProblem{a.x.as(), up, type, 1, size, kind, y.as()}, scrambled);
            CHECK_EQ(first_difference(y, a.y, type), -1);
            const ActivationGradientProblem p{
                a.dy.as(), a.x.as(), up, type, 1, size, kind, dx.as(), gated ? dup.as() : nullptr};
            run_chunks(k, p, scrambled);
            CHECK_EQ(first_difference(dx, a.dx, type), -1);
            if (gated) CHECK_EQ(first_difference(dup, a.dup, type), -1);
          });
        }
}

TEST(every_bfloat16_follows_the_rule) {
  std::mt19937 random(5);
  constexpr ElementType kType = ElementType::kBF16;
  for (const ActivationKind kind : kActivations) {
    const ActivationCase c{kind, kType, 1 << 16, true, Data::kNormal};
    const check::Given given(c.text());
    Buffer x(2 * c.size);
    for (int64_t i = 0; i < c.size; ++i) x.as<uint16_t>()[i] = static_cast<uint16_t>(i);
    const Activations a(c, std::move(x), random);
    for_all_runs([&](const Kernels& k, bool scrambled) {
      const Buffer y(a.y.size()), dx(a.y.size()), dup(a.y.size());
      run_chunks(k, ActivationProblem{a.x.as(), a.up.as(), kType, 1, c.size, kind, y.as()}, scrambled);
      CHECK_EQ(first_difference(y, a.y, kType), -1);
      run_chunks(k, ActivationGradientProblem{a.dy.as(), a.x.as(), a.up.as(), kType, 1, c.size, kind, dx.as(), dup.as()},
                 scrambled);
      CHECK_EQ(first_difference(dx, a.dx, kType), -1);
      CHECK_EQ(first_difference(dup, a.dup, kType), -1);
    });
  }
}

void check_norm(const Norms& n, bool has_amaxes = false) {
  const NormCase& c = n.c;
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer y(n.y.size()), total(n.y.size()), dx(n.y.size()), mean(n.mean.size()), inverse(n.inverse.size());
    NormProblem p = n.problem();
    p.x = n.x.as(), p.weight = n.weight.as<float>(), p.result = y.as(), p.inverse = inverse.as<float>();
    if (c.has_residual) p.residual = n.residual.as(), p.total = total.as();
    if (c.has_beta) p.beta = n.beta.as<float>();
    if (c.layer()) p.mean = mean.as<float>();
    const Amaxes amaxes(c.batch, c.has_residual, true);
    if (has_amaxes) p.amaxes = amaxes.wanted();
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(y, n.y, c.type), -1);
    if (has_amaxes) amaxes.check(y, c.type, c.batch, c.rows, c.columns);
    CHECK_EQ(first_difference(inverse, n.inverse, ElementType::kF32), -1);
    if (c.has_residual) CHECK_EQ(first_difference(total, n.total, c.type), -1);
    if (c.layer()) CHECK_EQ(first_difference(mean, n.mean, ElementType::kF32), -1);
    NormGradientProblem g = n.gradient_problem();
    g.dy = n.dy.as(), g.x = n.total.as(), g.weight = n.weight.as<float>(), g.inverse = n.inverse.as<float>(), g.dx = dx.as();
    if (c.has_residual) g.of_total = n.of_total.as();
    if (c.layer()) g.mean = n.mean.as<float>();
    run_chunks(k, g, scrambled);
    CHECK_EQ(first_difference(dx, n.dx, c.type), -1);
    g.has_beta = c.has_beta;
    const Buffer parts(4 * c.batch * g.parts() * g.sums_each()), sums(4 * c.batch * c.columns);
    g.sums = parts.as<float>();
    run_chunks(k, g, scrambled);
    CHECK_EQ(first_difference(dx, n.dx, c.type), -1);
    for (const bool of_beta : {false, true}) {
      if (of_beta && !c.has_beta) continue;
      const float* found = g.sums + (of_beta ? c.columns : 0);
      run_chunks(k, AddPartsProblem{found, g.sums_each(), c.batch, g.parts(), c.columns, sums.as<float>()}, scrambled);
      reference::check_sums(n, sums.as<float>(), of_beta);
    }
  });
}

TEST(norms_follow_the_rule) {
  std::mt19937 random(2);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : kTypes)
      for (const int64_t columns : {1, 5, 16, 255, 256, 257, 700, 4096})
        for (const bool has_residual : {false, true})
          for (const bool has_amaxes : {false, true}) {
            const int64_t rows = columns < 300 ? 70 : has_amaxes ? 19 : 3;
            const bool has_beta = kind == NormKind::kLayer && random() % 2;
            const NormCase c{kind, type, 2, rows, columns, has_residual, has_beta, kAnyData[random() % 6]};
            const check::Given given(c.text() + (has_amaxes ? " amaxes" : ""));
            check_norm(Norms(c, random), has_amaxes);
          }
}

/// Room for what is written of an array that is quantised and not stored.
struct Codes {
  const QuantizeCase& q;
  Buffer data, scale, columns_data, columns_scale;

  explicit Codes(const QuantizeCase& q)
      : q(q),
        data(q.rowwise.data.size()),
        scale(q.rowwise.scale.size()),
        columns_data(q.columnwise.data.size()),
        columns_scale(q.columnwise.scale.size()) {}

  QuantizeProblem wanted() const {
    QuantizeProblem p = q.problem;
    p.x = nullptr;
    if (q.rowwise.wanted) p.rowwise.data = data.as(), p.rowwise.scale = scale.as();
    if (q.columnwise.wanted) p.columnwise.data = columns_data.as(), p.columnwise.scale = columns_scale.as();
    return p;
  }

  void check() const { q.rowwise.check(data, scale), q.columnwise.check(columns_data, columns_scale); }
};

const Numbers* const kAnyNumbers[2] = {&kNumbers[0], &kNumbers[0]};  // no amax is given

/// Calls visit(format, mode) for the formats without a tensor scale, and the directions.
template <class Visit>
void for_all_block_formats(Visit visit) {
  for (const NamedFormat& format : kOtherFormats)
    for (const Mode& mode : kModes)
      if (format.format.scaling != Scaling::kTensor && !mode.rotate) visit(format, mode);
}

/// A quantised norm has the bytes of the norm's rule and then the quantisation's.
void check_quantized_norm(const Norms& n, const NamedFormat& format, const Mode& mode, bool stochastic,
                          std::mt19937& random) {
  const NormCase& c = n.c;
  const QuantizeCase q(n.y, {c.rows, c.columns}, c.type, format, mode, stochastic, kAnyNumbers, random);
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer total(n.y.size()), mean(n.mean.size()), inverse(n.inverse.size());
    const Codes codes(q);
    NormQuantizeProblem p{};
    static_cast<NormProblem&>(p) = n.problem();
    p.x = n.x.as(), p.weight = n.weight.as<float>(), p.inverse = inverse.as<float>();
    if (c.has_residual) p.residual = n.residual.as(), p.total = total.as();
    if (c.has_beta) p.beta = n.beta.as<float>();
    if (c.layer()) p.mean = mean.as<float>();
    p.quantize = codes.wanted();
    run_chunks(k, p, scrambled);
    codes.check();
    CHECK_EQ(first_difference(inverse, n.inverse, ElementType::kF32), -1);
    if (c.has_residual) CHECK_EQ(first_difference(total, n.total, c.type), -1);
    if (c.layer()) CHECK_EQ(first_difference(mean, n.mean, ElementType::kF32), -1);
  });
}

TEST(quantized_norms_have_the_bytes_of_both_rules) {
  std::mt19937 random(6);
  for_all_block_formats([&](const NamedFormat& format, const Mode& mode) {
    for (const ElementType type : kTypes)
      for (const Shape shape : {Shape{1, 1}, {33, 40}, {130, 300}, {200, 512}}) {
        if (kReduced && shape.columns > 300) continue;
        const NormKind kind = random() % 2 ? NormKind::kLayer : NormKind::kRms;
        const bool has_beta = kind == NormKind::kLayer && random() % 2, stochastic = random() % 3 == 0;
        const NormCase c{kind, type, 2, shape.rows, shape.columns, random() % 2 == 0, has_beta, kAnyData[random() % 6]};
        const check::Given given(c.text() + " " + format.name + " " + mode.name + (stochastic ? " stochastic" : ""));
        check_quantized_norm(Norms(c, random), format, mode, stochastic, random);
      }
  });
}

TEST(quantized_activations_have_the_bytes_of_both_rules) {
  std::mt19937 random(7);
  for_all_block_formats([&](const NamedFormat& format, const Mode& mode) {
    for (const ElementType type : kTypes)
      for (const Shape shape : {Shape{1, 1}, {33, 40}, {130, 300}, {150, 1600}, {3, 9000}}) {
        if (kReduced && shape.columns > 300) continue;
        const bool gated = random() % 2, stochastic = random() % 3 == 0;
        const int64_t size = shape.rows * shape.columns;
        const ActivationCase c{kActivations[random() % std::size(kActivations)], type, 2 * size, gated,
                               kAnyData[random() % 6]};
        const check::Given given(name(shape) + " " + c.text() + " " + format.name + " " + mode.name +
                                 (stochastic ? " stochastic" : ""));
        const Activations a(c, random);
        const auto quantized = [&](const Buffer& x, bool stochastic) {
          return QuantizeCase(x, shape, type, format, mode, stochastic, kAnyNumbers, random);
        };
        const QuantizeCase of_y = quantized(a.y, stochastic), of_dx = quantized(a.dx, false),
                           of_dup = quantized(a.dup, false);
        const void* const up = gated ? a.up.as() : nullptr;
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Codes y(of_y), dx(of_dx), dup(of_dup);
          ActivationQuantizeProblem p{{a.x.as(), up, type, 2, size, c.kind, nullptr, shape.columns}, y.wanted()};
          run_chunks(k, p, scrambled);
          y.check();
          ActivationGradientQuantizeProblem g{
              {a.dy.as(), a.x.as(), up, type, 2, size, c.kind, nullptr, nullptr, shape.columns}, {dx.wanted()}};
          if (gated) g.quantize[1] = dup.wanted();
          run_chunks(k, g, scrambled);
          dx.check();
          if (gated) dup.check();
        });
      }
  });
}

/// Sums begin at 0, so that none is -0.
TEST(means_of_negative_zeros_are_zero) {
  std::mt19937 random(3);
  for (const ElementType type : kTypes)
    for (const int64_t columns : {256, 264, 512}) {
      const NormCase c{NormKind::kLayer, type, 1, 2, columns, false, false, Data::kNegativeZero};
      const check::Given given(c.text());
      check_norm(Norms(c, random));
    }
}

}  // namespace
}  // namespace jaxlowprec
