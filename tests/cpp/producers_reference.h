// Activations and norms in scalar code that follows numerics.md 12: operands, and what the results must be.
#pragma once

#include "../../xla_ffi/numerics/activations.h"
#include "check.h"
#include "kernel_data.h"
#include "reference.h"

namespace jaxlowprec {
namespace reference {

constexpr ActivationKind kActivations[] = {ActivationKind::kGelu, ActivationKind::kSilu, ActivationKind::kReluSquared};
constexpr Data kAnyData[] = {Data::kNormal, Data::kSparse, Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity};

inline std::string name(Data data) {
  constexpr const char* kNames[] = {"normal", "sparse", "wide", "zero", "NaN", "infinity", "negative zero"};
  return kNames[static_cast<int>(data)];
}

inline Buffer filled(ElementType type, int64_t count, Data data, std::mt19937& random) {
  Buffer x(count * element_size(type), random() % 2 * 4);
  fill_elements(x.as(), type, 0, count, data, random);
  return x;
}

/// The amaxes of a result's matrix: the plain one, or that after the rotation along the columns.
inline uint32_t amax_of_result(const void* y, ElementType type, int64_t rows, int64_t columns, int64_t batch, bool rotated) {
  const AmaxProblem p{y, type, batch + 1, rows, columns, nullptr, nullptr, kDefaultSignMask};
  return amax_bits(lines_of(p, batch, rotated, rotated));
}

/// The sums of matrices' columns, float32 [batch, columns], in the order of numerics.md 12.3.
inline Buffer sums_over_rows(const Buffer& x, ElementType type, int64_t batch, int64_t rows, int64_t columns) {
  Buffer sums(batch * columns * 4);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t k = 0; k < columns; ++k) {
      float apart[8] = {};
      for (int64_t part = 0; 64 * part < rows; ++part) {
        float of_part = 0;
        for (int64_t first = 64 * part; first < std::min(rows, 64 * part + 64); first += 16) {
          float sixteen = 0;
          for (int64_t r = first; r < std::min(rows, first + 16); ++r)
            sixteen = add(sixteen, get(x.as(), type, (b * rows + r) * columns + k));
          of_part = add(of_part, sixteen);
        }
        apart[part % 8] = add(apart[part % 8], of_part);
      }
      for (int i = 1; i < 8; ++i) apart[0] = add(apart[0], apart[i]);
      put(sums.as(), ElementType::kF32, b * columns + k, apart[0]);
    }
  return sums;
}

struct ActivationCase {
  ActivationKind kind;
  ElementType type;
  int64_t size;
  bool gated;
  Data data;

  std::string text() const {
    return std::to_string(size) + " " + jaxlowprec::name(type) + " " + name(data) + (gated ? " gated" : "") + " kind " +
           std::to_string(static_cast<int>(kind));
  }
};

struct Activations {
  Buffer x, up, dy;   // up where it is gated
  Buffer y, dx, dup;  // what is to be found

  Activations(const ActivationCase& c, std::mt19937& random)
      : Activations(c, filled(c.type, c.size, c.data, random), random) {}

  Activations(const ActivationCase& c, Buffer given, std::mt19937& random)
      : x(std::move(given)),
        up(filled(c.type, c.size, Data::kNormal, random)),
        dy(filled(c.type, c.size, Data::kSparse, random)),
        y(x.size()),
        dx(x.size()),
        dup(x.size()) {
    with_rule(c.kind, [&](auto rule) {
      for (int64_t i = 0; i < c.size; ++i) {
        const float g = get(x.as(), c.type, i), u = get(up.as(), c.type, i), d = get(dy.as(), c.type, i);
        const float v = rule.value(g);
        put(y.as(), c.type, i, c.gated ? multiply(v, u) : v);
        const ValueAndSlope<float> found = rule.with_slope(g);
        put(dx.as(), c.type, i, multiply(c.gated ? multiply(d, u) : d, found.slope));
        put(dup.as(), c.type, i, multiply(d, found.value));
      }
    });
  }
};

// --- norms

/// 256 sums by place, then of halves; times 1 / count.
template <class Value>
float mean_of(int64_t count, Value value) {
  float places[256] = {};
  for (int64_t k = 0; k < count; ++k) places[k % 256] = add(places[k % 256], value(k));
  for (int half = 128; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) places[j] = add(places[j], places[j + half]);
  return multiply(places[0], static_cast<float>(1.0 / count));
}

struct NormCase {
  NormKind kind;
  ElementType type;
  int64_t batch, rows, columns;
  bool has_residual, has_beta;
  Data data;

  bool layer() const { return kind == NormKind::kLayer; }
  int64_t lines() const { return batch * rows; }
  int64_t size() const { return lines() * columns; }
  std::string text() const {
    return std::to_string(batch) + "x" + std::to_string(rows) + "x" + std::to_string(columns) + " " +
           jaxlowprec::name(type) + " " + name(data) + (layer() ? " layer" : " rms") + (has_residual ? " residual" : "") +
           (has_beta ? " beta" : "");
  }
};

/// Operands of a norm and of its gradient, and the results. The gradient's x is `total`.
struct Norms {
  NormCase c;
  Buffer x, residual, dy, of_total, weight, beta;
  Buffer y, total, dx, mean, inverse;  // what is to be found

  Norms(const NormCase& given, std::mt19937& random)
      : c(given),
        x(filled(c.type, c.size(), c.data, random)),
        residual(filled(c.type, c.size(), Data::kNormal, random)),
        dy(filled(c.type, c.size(), Data::kNormal, random)),
        of_total(filled(c.type, c.size(), Data::kNormal, random)),
        weight(filled(ElementType::kF32, c.batch * c.columns, Data::kNormal, random)),
        beta(filled(ElementType::kF32, c.batch * c.columns, Data::kNormal, random)),
        y(x.size()),
        total(x.size()),
        dx(x.size()),
        mean(c.lines() * 4),
        inverse(c.lines() * 4) {
    for (int64_t line = 0; line < c.lines(); ++line) find_line(line);
  }

  /// The terms of row r that the gradient of the weight, or of beta, at k of a matrix is the sum of.
  float term(bool of_beta, int64_t b, int64_t r, int64_t k) const {
    const int64_t line = b * c.rows + r;
    const float d = get(dy.as(), c.type, line * c.columns + k), x = get(total.as(), c.type, line * c.columns + k);
    if (of_beta) return d;
    return multiply(d, multiply(c.layer() ? add(x, -mean.as<float>()[line]) : x, inverse.as<float>()[line]));
  }

  /// The problem without pointers.
  NormProblem problem() const {
    NormProblem p{};
    p.kind = c.kind, p.type = c.type, p.batch = c.batch, p.rows = c.rows, p.columns = c.columns, p.epsilon = 1e-6f;
    return p;
  }
  NormGradientProblem gradient_problem() const {
    NormGradientProblem p{};
    p.kind = c.kind, p.type = c.type, p.batch = c.batch, p.rows = c.rows, p.columns = c.columns;
    return p;
  }

 private:
  void find_line(int64_t line) {
    const auto at = [&](const Buffer& b, int64_t k) { return get(b.as(), c.type, line * c.columns + k); };
    const auto set = [&](const Buffer& b, int64_t k, float v) { put(b.as(), c.type, line * c.columns + k, v); };
    const auto of_matrix = [&](const Buffer& b, int64_t k) {
      return get(b.as(), ElementType::kF32, line / c.rows * c.columns + k);
    };
    for (int64_t k = 0; k < c.columns; ++k) set(total, k, c.has_residual ? add(at(x, k), at(residual, k)) : at(x, k));
    const float m = c.layer() ? mean_of(c.columns, [&](int64_t k) { return at(total, k); }) : 0.0f;
    const auto centered = [&](int64_t k) { return c.layer() ? add(at(total, k), -m) : at(total, k); };
    const float square = mean_of(c.columns, [&](int64_t k) { return multiply(centered(k), centered(k)); });
    const float r = 1.0f / std::sqrt(add(square, 1e-6f));
    mean.as<float>()[line] = m, inverse.as<float>()[line] = r;
    const auto normed = [&](int64_t k) { return multiply(centered(k), r); };
    const auto scaled = [&](int64_t k) { return multiply(at(dy, k), of_matrix(weight, k)); };
    const float slope = mean_of(c.columns, [&](int64_t k) { return multiply(scaled(k), normed(k)); });
    const float center = c.layer() ? mean_of(c.columns, scaled) : 0.0f;
    for (int64_t k = 0; k < c.columns; ++k) {
      const float v = multiply(normed(k), of_matrix(weight, k));
      set(y, k, c.has_beta ? add(v, of_matrix(beta, k)) : v);
      const float g = c.layer() ? add(scaled(k), -center) : scaled(k);
      const float d = multiply(add(g, -multiply(normed(k), slope)), r);
      set(dx, k, c.has_residual ? add(d, at(of_total, k)) : d);
    }
  }
};

/// Sums over rows are those in double precision, within a rounding of the terms' magnitudes for each row.
inline void check_sums(const Norms& n, const float* found, bool of_beta) {
  const NormCase& c = n.c;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t k = 0; k < c.columns; ++k) {
      double exact = 0, magnitudes = 0;
      for (int64_t r = 0; r < c.rows; ++r)
        exact += n.term(of_beta, b, r, k), magnitudes += std::abs(n.term(of_beta, b, r, k));
      const double difference = found[b * c.columns + k] - exact, rounding = std::ldexp(1.0, -24);
      if (std::isnan(exact)) CHECK(std::isnan(difference));
      if (magnitudes < 1e38) CHECK(std::abs(difference) <= c.rows * (rounding * magnitudes + std::ldexp(1.0, -126)));
    }
}

}  // namespace reference
}  // namespace jaxlowprec
