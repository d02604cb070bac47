// Activations and norms: the kernels of every instruction set have the bits of scalar code that follows numerics.md 12.
#include "../../xla_ffi/numerics/activations.h"
#include "kernel_runs.h"
#include "reference.h"

namespace jaxlowprec {
namespace {

using reference::add;
using reference::get;
using reference::multiply;

constexpr Data kData[] = {Data::kNormal, Data::kSparse, Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity};
constexpr ActivationKind kKinds[] = {ActivationKind::kGelu, ActivationKind::kSilu, ActivationKind::kReluSquared};

std::string name(Data data) {
  constexpr const char* kNames[] = {"normal", "sparse", "wide", "zero", "NaN", "infinity"};
  return kNames[static_cast<int>(data)];
}

float value(ActivationKind kind, float x) {
  if (kind == ActivationKind::kGelu) return Gelu::value(x);
  return kind == ActivationKind::kSilu ? Silu::value(x) : ReluSquared::value(x);
}

ValueAndSlope<float> with_slope(ActivationKind kind, float x) {
  if (kind == ActivationKind::kGelu) return Gelu::with_slope(x);
  return kind == ActivationKind::kSilu ? Silu::with_slope(x) : ReluSquared::with_slope(x);
}

Buffer filled(ElementType type, int64_t count, Data data, std::mt19937& random) {
  Buffer x(count * reference::element_size(type), random() % 2 * 4);
  fill_elements(x.as(), type, 0, count, data, random);
  return x;
}

// --- the amaxes of a result (numerics.md 1 and 3)

/// Room for the amaxes of a batch, and what is expected in it.
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
    const AmaxProblem p{y.as(), type, batch, rows, columns, nullptr, nullptr, kDefaultSignMask};
    for (int64_t b = 0; b < batch; ++b) {
      if (has_plain) CHECK_EQ(plain.as<uint32_t>()[b], reference::amax_bits(reference::lines_of(p, b, false, false)));
      if (has_rotated) CHECK_EQ(rotated.as<uint32_t>()[b], reference::amax_bits(reference::lines_of(p, b, true, true)));
    }
  }
};

TEST(activations_give_the_amaxes_of_their_results) {
  std::mt19937 random(3);
  struct Shape {
    int64_t batch, rows, columns;
  };
  for (const Shape s : {Shape{1, 1, 1}, {2, 16, 128}, {3, 19, 33}, {2, 35, 300}, {1, 17, 4200}, {2, 130, 7}})
    for (const ElementType type : kTypes)
      for (const ActivationKind kind : kKinds)
        for (const bool gated : {false, true}) {
          if (kReduced && random() % 4) continue;
          const Data data = kData[random() % 6];
          const check::Given given(std::to_string(s.rows) + "x" + std::to_string(s.columns) + " " + name(type) + " " +
                                   name(data) + (gated ? " gated" : "") + " kind " + std::to_string(static_cast<int>(kind)));
          const int64_t size = s.rows * s.columns, count = s.batch * size, bytes = count * reference::element_size(type);
          const Buffer x = filled(type, count, data, random), up = filled(type, count, Data::kNormal, random);
          const Buffer dy = filled(type, count, Data::kSparse, random);
          const int which = 1 + static_cast<int>(random() % 3);
          for_all_runs([&](const Kernels& k, bool scrambled) {
            const Buffer y(bytes), plain_y(bytes), dx(bytes), dup(bytes), plain_dx(bytes), plain_dup(bytes);
            const Amaxes of_y(s.batch, which & 1, which & 2), of_dx(s.batch, which & 1, which & 2);
            const Amaxes of_dup(s.batch, which & 1, which & 2);
            ActivationProblem p{x.as(), gated ? up.as() : nullptr, type, 1, count, kind, plain_y.as()};
            run_chunks(k, p, scrambled);
            p.batch = s.batch, p.size = size, p.columns = s.columns, p.result = y.as(), p.amaxes = of_y.wanted();
            run_chunks(k, p, scrambled);
            CHECK_EQ(first_difference(y, plain_y, type), -1);
            of_y.check(y, type, s.batch, s.rows, s.columns);
            ActivationGradientProblem g{dy.as(), x.as(),        gated ? up.as() : nullptr,       type, 1, count,
                                        kind,    plain_dx.as(), gated ? plain_dup.as() : nullptr};
            run_chunks(k, g, scrambled);
            g.batch = s.batch, g.size = size, g.columns = s.columns, g.dx = dx.as(), g.of_dx = of_dx.wanted();
            if (gated) g.dup = dup.as(), g.of_dup = of_dup.wanted();
            run_chunks(k, g, scrambled);
            CHECK_EQ(first_difference(dx, plain_dx, type), -1);
            of_dx.check(dx, type, s.batch, s.rows, s.columns);
            if (!gated) return;
            CHECK_EQ(first_difference(dup, plain_dup, type), -1);
            of_dup.check(dup, type, s.batch, s.rows, s.columns);
          });
        }
}

// --- the rules

TEST(activations_follow_the_rule) {
  std::mt19937 random(1);
  for (const int64_t size : {1, 7, 16, 33, 1000, 20000})
    for (const ElementType type : kTypes)
      for (const ActivationKind kind : kKinds)
        for (const bool gated : {false, true}) {
          const Data data = kData[random() % 6];
          const check::Given given(std::to_string(size) + " " + name(type) + " " + name(data) + (gated ? " gated" : "") +
                                   " kind " + std::to_string(static_cast<int>(kind)));
          const Buffer x = filled(type, size, data, random), up = filled(type, size, Data::kNormal, random);
          const Buffer dy = filled(type, size, Data::kSparse, random);
          const int64_t bytes = size * reference::element_size(type);
          const Buffer y(bytes), dx(bytes), dup(bytes);
          for (int64_t i = 0; i < size; ++i) {
            const float g = get(x.as(), type, i), u = get(up.as(), type, i), d = get(dy.as(), type, i);
            const float v = value(kind, g);
            reference::put(y.as(), type, i, gated ? multiply(v, u) : v);
            const ValueAndSlope<float> found = with_slope(kind, g);
            reference::put(dx.as(), type, i, multiply(gated ? multiply(d, u) : d, found.slope));
            reference::put(dup.as(), type, i, multiply(d, found.value));
          }
          for_all_runs([&](const Kernels& k, bool scrambled) {
            const Buffer result(bytes), of_x(bytes), of_up(bytes);
            run_chunks(k, ActivationProblem{x.as(), gated ? up.as() : nullptr, type, 1, size, kind, result.as()}, scrambled);
            CHECK_EQ(first_difference(result, y, type), -1);
            const ActivationGradientProblem p{dy.as(), x.as(),    gated ? up.as() : nullptr,   type, 1, size,
                                              kind,    of_x.as(), gated ? of_up.as() : nullptr};
            run_chunks(k, p, scrambled);
            CHECK_EQ(first_difference(of_x, dx, type), -1);
            if (gated) CHECK_EQ(first_difference(of_up, dup, type), -1);
          });
        }
}

TEST(every_bfloat16_follows_the_rule) {
  constexpr int64_t kCount = 1 << 16;
  constexpr ElementType kType = ElementType::kBF16;
  const Buffer x(2 * kCount), one(2 * kCount);
  for (int64_t i = 0; i < kCount; ++i) x.as<uint16_t>()[i] = static_cast<uint16_t>(i), one.as<uint16_t>()[i] = 0x3F80;
  for (const ActivationKind kind : kKinds) {
    const check::Given given("kind " + std::to_string(static_cast<int>(kind)));
    const Buffer y(2 * kCount), dx(2 * kCount), dup(2 * kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      const float g = get(x.as(), kType, i);
      const ValueAndSlope<float> found = with_slope(kind, g);
      reference::put(y.as(), kType, i, value(kind, g));
      reference::put(dx.as(), kType, i, found.slope), reference::put(dup.as(), kType, i, found.value);
    }
    for_all_runs([&](const Kernels& k, bool scrambled) {
      const Buffer result(2 * kCount), of_x(2 * kCount), of_up(2 * kCount);
      run_chunks(k, ActivationProblem{x.as(), one.as(), kType, 1, kCount, kind, result.as()}, scrambled);
      CHECK_EQ(first_difference(result, y, kType), -1);
      run_chunks(k, ActivationGradientProblem{one.as(), x.as(), one.as(), kType, 1, kCount, kind, of_x.as(), of_up.as()},
                 scrambled);
      CHECK_EQ(first_difference(of_x, dx, kType), -1);
      CHECK_EQ(first_difference(of_up, dup, kType), -1);
    });
  }
}

/// 256 sums by place, then of halves; times 1 / count.
template <class Value>
float mean_of(int64_t count, Value value) {
  float places[256] = {};
  for (int64_t k = 0; k < count; ++k) places[k % 256] = k < 256 ? value(k) : add(places[k % 256], value(k));
  for (int half = 128; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) places[j] = add(places[j], places[j + half]);
  return multiply(places[0], static_cast<float>(1.0 / count));
}

struct NormCase {
  NormKind kind;
  ElementType type;
  int64_t rows, columns;
  bool has_residual, has_beta, has_amaxes;
  Data data;

  std::string text() const {
    return std::to_string(rows) + "x" + std::to_string(columns) + " " + name(type) + " " + name(data) +
           (kind == NormKind::kLayer ? " layer" : " rms") + (has_residual ? " residual" : "") + (has_beta ? " beta" : "") +
           (has_amaxes ? " amaxes" : "");
  }
};

void check_norm(const NormCase& c, std::mt19937& random) {
  const check::Given given(c.text());
  constexpr int64_t kBatch = 2;
  const int64_t lines = kBatch * c.rows, size = lines * c.columns, bytes = size * reference::element_size(c.type);
  const bool layer = c.kind == NormKind::kLayer;
  const Buffer x = filled(c.type, size, c.data, random), residual = filled(c.type, size, Data::kNormal, random);
  const Buffer dy = filled(c.type, size, Data::kNormal, random), of_total = filled(c.type, size, Data::kNormal, random);
  const Buffer weight = filled(ElementType::kF32, kBatch * c.columns, Data::kNormal, random);
  const Buffer beta = filled(ElementType::kF32, kBatch * c.columns, Data::kNormal, random);
  const Buffer y(bytes), total(bytes), dx(bytes), mean(lines * 4), inverse(lines * 4);
  for (int64_t line = 0; line < lines; ++line) {
    const auto at = [&](const Buffer& b, int64_t k) { return get(b.as(), c.type, line * c.columns + k); };
    const auto of_matrix = [&](const Buffer& b, int64_t k) {
      return get(b.as(), ElementType::kF32, line / c.rows * c.columns + k);
    };
    for (int64_t k = 0; k < c.columns; ++k)
      reference::put(total.as(), c.type, line * c.columns + k, c.has_residual ? add(at(x, k), at(residual, k)) : at(x, k));
    float m = 0;
    if (layer) m = mean_of(c.columns, [&](int64_t k) { return at(total, k); });
    const auto centered = [&](int64_t k) { return layer ? add(at(total, k), -m) : at(total, k); };
    const float square = mean_of(c.columns, [&](int64_t k) { return multiply(centered(k), centered(k)); });
    const float r = 1.0f / std::sqrt(add(square, 1e-6f));
    mean.as<float>()[line] = m, inverse.as<float>()[line] = r;
    const auto normed = [&](int64_t k) { return multiply(centered(k), r); };
    const auto scaled = [&](int64_t k) { return multiply(at(dy, k), of_matrix(weight, k)); };
    const float slope = mean_of(c.columns, [&](int64_t k) { return multiply(scaled(k), normed(k)); });
    const float center = layer ? mean_of(c.columns, scaled) : 0;
    for (int64_t k = 0; k < c.columns; ++k) {
      const float v = multiply(normed(k), of_matrix(weight, k));
      reference::put(y.as(), c.type, line * c.columns + k, c.has_beta ? add(v, of_matrix(beta, k)) : v);
      const float g = layer ? add(scaled(k), -center) : scaled(k);
      const float d = multiply(add(g, -multiply(normed(k), slope)), r);
      reference::put(dx.as(), c.type, line * c.columns + k, c.has_residual ? add(d, at(of_total, k)) : d);
    }
  }
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer result(bytes), sum(bytes), means(lines * 4), inverses(lines * 4), gradient(bytes);
    NormProblem p{};
    p.kind = c.kind, p.type = c.type, p.batch = kBatch, p.rows = c.rows, p.columns = c.columns, p.epsilon = 1e-6f;
    p.x = x.as(), p.weight = weight.as<float>(), p.result = result.as(), p.inverse = inverses.as<float>();
    if (c.has_residual) p.residual = residual.as(), p.total = sum.as();
    if (c.has_beta) p.beta = beta.as<float>();
    if (layer) p.mean = means.as<float>();
    const Amaxes amaxes(kBatch, c.has_residual, true);
    if (c.has_amaxes) p.amaxes = amaxes.wanted();
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(result, y, c.type), -1);
    if (c.has_amaxes) amaxes.check(result, c.type, kBatch, c.rows, c.columns);
    CHECK_EQ(first_difference(inverses, inverse, ElementType::kF32), -1);
    if (c.has_residual) CHECK_EQ(first_difference(sum, total, c.type), -1);
    if (layer) CHECK_EQ(first_difference(means, mean, ElementType::kF32), -1);
    NormGradientProblem g{};
    g.kind = c.kind, g.type = c.type, g.batch = kBatch, g.rows = c.rows, g.columns = c.columns;
    g.dy = dy.as(), g.x = total.as(), g.weight = weight.as<float>(), g.inverse = inverse.as<float>(), g.dx = gradient.as();
    if (c.has_residual) g.of_total = of_total.as();
    if (layer) g.mean = mean.as<float>();
    run_chunks(k, g, scrambled);
    CHECK_EQ(first_difference(gradient, dx, c.type), -1);
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
            check_norm({kind, type, rows, columns, has_residual, has_beta, has_amaxes, kData[random() % 6]}, random);
          }
}

}  // namespace
}  // namespace jaxlowprec
