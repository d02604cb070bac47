// A GEMM of xla_ffi/cuda/matmul/matmul.cc with random operands, through the model of cuBLASLt, and how far its result is
// from float64's.
#pragma once

#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>

#include "../../../xla_ffi/cuda/matmul/matmul.h"
#include "../../../xla_ffi/cuda/matmul/matmul_plan.h"
#include "../../cpp/check.h"
#include "../../cpp/format_makers.h"
#include "../../cpp/matmul_reference.h"
#include "../../cpp/rebase_reference.h"
#include "cublaslt_model.h"
#include "matmul_doubles.h"

using namespace jaxlowprec;

template <class Function>
Function model(const char* name) {
  static void* const library = dlopen(std::getenv("JAXLOWPREC_CUBLASLT"), RTLD_NOW);
  return reinterpret_cast<Function>(dlsym(library, name));
}

/// Another GPU: what is known of one does not hold for the other.
inline void set_capability(int capability) {
  doubles::capability = doubles::device = capability;
  model<decltype(&cublaslt_model_set_capability)>("cublaslt_model_set_capability")(capability);
}
inline int handles() { return model<decltype(&cublaslt_model_handles)>("cublaslt_model_handles")(); }
inline int algorithm() { return model<decltype(&cublaslt_model_algorithm)>("cublaslt_model_algorithm")(); }
inline void refuse_blocks_below(int64_t depth, bool by_count) {
  model<decltype(&cublaslt_model_refuse_blocks_below)>("cublaslt_model_refuse_blocks_below")(depth, by_count);
}
inline void device_beta_reads(bool reads) {
  model<decltype(&cublaslt_model_device_beta_reads)>("cublaslt_model_device_beta_reads")(reads);
}
inline std::string refusal() { return model<decltype(&cublaslt_model_refusal)>("cublaslt_model_refusal")(); }
inline void set_milliseconds(int algorithm, float each) {
  model<decltype(&cublaslt_model_set_milliseconds)>("cublaslt_model_set_milliseconds")(algorithm, each);
}
inline int heuristics() { return model<decltype(&cublaslt_model_heuristics)>("cublaslt_model_heuristics")(); }

// --- formats

constexpr CodeType k2 = CodeType::kE2M1, k4 = CodeType::kE4M3, k5 = CodeType::kE5M2;

// --- a problem with random operands

struct Sizes {
  int64_t batch, rows, columns, depth;
};

struct Memory {  // aligned as XLA aligns buffers
  explicit Memory(size_t bytes) : data(static_cast<uint8_t*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256))) {}
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  uint8_t* const data;
};

struct Case {
  Sizes sizes;
  MatmulProblem p{};
  Memory a_data, b_data, a_scale, b_scale, result, accumulate;
  std::vector<float> alpha_beta;

  Case(const Format& a, const Format& b, Sizes s, ElementType type, bool accumulates)
      : sizes(s),
        a_data(s.batch * s.rows * a.row_bytes(s.depth)),
        b_data(s.batch * s.columns * b.row_bytes(s.depth)),
        a_scale(s.batch * a.scales(s.rows, s.depth) * a.scale_bytes()),
        b_scale(s.batch * b.scales(s.columns, s.depth) * b.scale_bytes()),
        result(4 * s.batch * s.rows * s.columns),
        accumulate(4 * s.batch * s.rows * s.columns) {
    p.a = operand(a, s.rows, a_data.data, a_scale.data);
    p.b = operand(b, s.columns, b_data.data, b_scale.data);
    p.batch = s.batch, p.rows = s.rows, p.columns = s.columns;
    p.result = result.data, p.type = p.accumulate_type = type;
    std::uniform_real_distribution<float> numbers(-4, 4);
    for (int64_t i = 0; i < s.batch * s.rows * s.columns; ++i) reference::put(accumulate.data, type, i, numbers(random));
    if (accumulates) p.accumulate = accumulate.data;
    if (a.scaling != Scaling::kTwoLevel && a.scaling != Scaling::kTensor) return;
    for (int64_t i = 0; i < s.batch; ++i) {
      alpha_beta.push_back(0.25f * (1 + i) + 1 / 512.0f);
      alpha_beta.push_back(accumulates);
    }
  }

  cuda::MatmulResources resources(int64_t missing_workspace = 0) {
    static const Memory workspace(size_t{34} << 20);
    const int64_t bytes = cuda::plan_matmul(p, doubles::capability).workspace_bytes() - missing_workspace;
    return {alpha_beta.empty() ? nullptr : alpha_beta.data(), workspace.data + 128, bytes};  // as XLA may align it
  }

  std::string run(int64_t missing_workspace = 0) {
    std::memset(result.data, 0xFF, 4 * sizes.batch * sizes.rows * sizes.columns);  // NaN
    return cuda::launch(p, resources(missing_workspace), nullptr);
  }

 private:
  std::mt19937 random{7};

  /// Codes and scales of every kind but NaN and infinity, of magnitudes whose products float32 holds.
  MatmulOperand operand(const Format& f, int64_t rows, uint8_t* data, uint8_t* scale) {
    const int64_t codes = sizes.batch * rows * f.row_bytes(sizes.depth);
    const int64_t scales = sizes.batch * f.scales(rows, sizes.depth);
    for (int64_t i = 0; i < codes; ++i) {
      uint32_t code = random() & 255;
      if (f.code == k4 && (code & 0x7F) == 0x7F) code ^= 1;
      if (f.code == k5 && (code & 0x7C) == 0x7C) code ^= 0x40;
      data[i] = static_cast<uint8_t>(code);
    }
    for (int64_t i = 0; i < scales; ++i) {
      const float number = f.power_of_two ? std::ldexp(1.0f, static_cast<int>(random() % 17) - 8)
                                          : 0.01f + static_cast<float>(random() % 1000);
      if (f.scale_bytes() == 4)
        std::memcpy(scale + 4 * i, &number, 4);
      else if (f.scale_bytes() == 2)
        reference::put(scale, f.scale_type, i, number);
      else
        scale[i] = static_cast<uint8_t>(f.scaling == Scaling::kE8M0 ? 115 + random() % 24 : random() % 0x7F);
    }
    return {f, data, scale, nullptr, sizes.depth};
  }
};

/// [rows, depth] of one batch entry; those of tensors without their scale, which belongs to alpha.
inline std::vector<double> decoded(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t depth) {
  const reference::DecodedOperand o(operand, rows, batch, depth);
  std::vector<double> values(o.codes.begin(), o.codes.end());
  if (operand.format.scaling == Scaling::kTensor) return values;
  const int64_t block = operand.format.scaling == Scaling::kRows ? depth : operand.format.block;
  for (int64_t i = 0; i < rows * depth; ++i) values[i] *= o.scales[i / depth * o.blocks + i % depth / block];
  return values;
}

/// What the elements of an operand may be off by on a route: SumError's T is of their magnitudes and this (gemm_error.h).
inline std::vector<double> element_errors(const MatmulOperand& given, int64_t rows, int64_t batch, int64_t depth,
                                          cuda::MatmulRoute route) {
  std::vector<double> errors(rows * depth);
  if (!cuda::rebased(route, given.format)) return errors;
  MatmulOperand o = given;
  o.data += batch * rows * o.format.row_bytes(depth), o.scale += batch * o.format.scales(rows, depth);
  for (int64_t i = 0; i < rows * depth; ++i) {
    const int64_t row = i / depth, k = i % depth;
    const int largest = reference::largest_e8m0_scale(o, row, k / 128 * 128);
    if (reference::e8m0_scale(o, row, k) < largest - 14) errors[i] = std::ldexp(cuda::kRebaseError, largest - 127);
  }
  return errors;
}

inline cuda::MatmulRoute route_of(const Case& c) { return cuda::plan_matmul(c.p, doubles::capability).route; }

/// How many results are further from the product of the decoded operands in float64 than `sum_error` of the sum of the
/// terms' magnitudes, what their route makes of the elements, and one rounding to the result's type. The first is reported
/// unless they are `expected`.
inline int64_t results_beyond(const Case& c, double sum_error, bool expected = true) {
  const MatmulProblem& p = c.p;
  const int64_t depth = c.sizes.depth;
  const double unit = 1.01 * std::ldexp(1, p.type == ElementType::kF32 ? -24 : -8);
  int64_t beyond = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const auto a = decoded(p.a, p.rows, batch, depth), b = decoded(p.b, p.columns, batch, depth);
    const auto a_errors = element_errors(p.a, p.rows, batch, depth, route_of(c));
    const auto b_errors = element_errors(p.b, p.columns, batch, depth, route_of(c));
    const double alpha = c.alpha_beta.empty() ? 1 : c.alpha_beta[2 * batch];
    for (int64_t m = 0; m < p.rows; ++m)
      for (int64_t n = 0; n < p.columns; ++n) {
        double sum = 0, magnitude = 0, magnitude_at_most = 0;
        for (int64_t k = 0; k < depth; ++k) {
          const int64_t i = m * depth + k, j = n * depth + k;
          sum += a[i] * b[j], magnitude += std::abs(a[i] * b[j]);
          magnitude_at_most += (std::abs(a[i]) + a_errors[i]) * (std::abs(b[j]) + b_errors[j]);
        }
        const int64_t index = (batch * p.rows + m) * p.columns + n;
        const double onto = p.accumulate ? reference::get(p.accumulate, p.type, index) : 0;
        const double exact = alpha * sum + onto;
        const double of_sum = sum_error * magnitude_at_most + magnitude_at_most - magnitude;
        const double bound = alpha * of_sum + unit * std::abs(exact);
        const double found = reference::get(p.result, p.type, index);
        if (std::abs(found - exact) <= bound) continue;
        if (++beyond == 1 && !expected) CHECK_EQ(found, exact);
      }
  }
  return beyond;
}

inline double contract(const Case& c) { return std::ldexp(static_cast<double>(c.sizes.depth), -24); }  // numerics.md 9

/// The bound of the way that the GEMM takes.
inline void check_result(const Case& c) {
  CHECK_EQ(results_beyond(c, cuda::sum_error(route_of(c), doubles::capability, c.sizes.depth).expected, false), 0);
}

/// Scales as they lie in memory, column by column.
inline std::vector<uint8_t> by_columns(const MatmulOperand& o, int64_t batch, int64_t rows) {
  const int64_t blocks = o.format.scale_columns(o.columns), size = rows * blocks, bytes = o.format.scale_bytes();
  std::vector<uint8_t> found(batch * size * bytes);
  for (int64_t i = 0; i < batch * size; ++i)
    std::memcpy(&found[i * bytes], o.scale + (i / size * size + i % rows * blocks + i % size / rows) * bytes, bytes);
  return found;
}

inline bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
