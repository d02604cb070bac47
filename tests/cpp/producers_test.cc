// Activations and norms: the kernels of every instruction set have the bits of scalar code that follows numerics.md 12.
#include "kernel_runs.h"
#include "producers_reference.h"

namespace jaxlowprec {
namespace {

using reference::ActivationCase;
using reference::Activations;
using reference::kActivations;
using reference::kAnyData;
using reference::NormCase;
using reference::Norms;

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

void check_norm(const Norms& n) {
  const NormCase& c = n.c;
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer y(n.y.size()), total(n.y.size()), dx(n.y.size()), mean(n.mean.size()), inverse(n.inverse.size());
    NormProblem p = n.problem();
    p.x = n.x.as(), p.weight = n.weight.as<float>(), p.result = y.as(), p.inverse = inverse.as<float>();
    if (c.has_residual) p.residual = n.residual.as(), p.total = total.as();
    if (c.has_beta) p.beta = n.beta.as<float>();
    if (c.layer()) p.mean = mean.as<float>();
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(y, n.y, c.type), -1);
    CHECK_EQ(first_difference(inverse, n.inverse, ElementType::kF32), -1);
    if (c.has_residual) CHECK_EQ(first_difference(total, n.total, c.type), -1);
    if (c.layer()) CHECK_EQ(first_difference(mean, n.mean, ElementType::kF32), -1);
    NormGradientProblem g = n.gradient_problem();
    g.dy = n.dy.as(), g.x = n.total.as(), g.weight = n.weight.as<float>(), g.inverse = n.inverse.as<float>(), g.dx = dx.as();
    if (c.has_residual) g.of_total = n.of_total.as();
    if (c.layer()) g.mean = n.mean.as<float>();
    run_chunks(k, g, scrambled);
    CHECK_EQ(first_difference(dx, n.dx, c.type), -1);
  });
}

TEST(norms_follow_the_rule) {
  std::mt19937 random(2);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer})
    for (const ElementType type : kTypes)
      for (const int64_t columns : {1, 5, 16, 255, 256, 257, 700, 4096})
        for (const bool has_residual : {false, true}) {
          const int64_t rows = columns < 300 ? 70 : 3;
          const bool has_beta = kind == NormKind::kLayer && random() % 2;
          const NormCase c{kind, type, 2, rows, columns, has_residual, has_beta, kAnyData[random() % 6]};
          const check::Given given(c.text());
          check_norm(Norms(c, random));
        }
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
