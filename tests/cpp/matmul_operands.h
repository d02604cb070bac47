// What the tests of GEMMs share: all formats and pairs, operands of ordinary and hostile numbers, and a small product.
#pragma once

#include "format_makers.h"
#include "kernel_runs.h"
#include "matmul_reference.h"

namespace jaxlowprec {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- formats

constexpr Format format(CodeType code, Scaling scaling, bool tiles) {
  const int block = scaling == Scaling::kTwoLevel  ? 16
                    : scaling == Scaling::kE8M0    ? 32
                    : scaling == Scaling::kFloat32 ? 128
                                                   : 1;
  return {code, scaling, block, tiles, ScaleRule::kUp, false, 0};
}

constexpr Format int4_format(int block, ElementType scale_type) {
  return {CodeType::kInt4, Scaling::kFloat16, block, false, ScaleRule::kUp, false, 0, scale_type};
}

inline std::vector<Format> formats() {
  std::vector<Format> all;
  for (const bool tiles : {false, true}) {
    all.push_back(format(CodeType::kE2M1, Scaling::kTwoLevel, tiles));
    for (const CodeType code : {CodeType::kE2M1, CodeType::kE4M3, CodeType::kE5M2})
      all.push_back(format(code, Scaling::kE8M0, tiles));
    for (const CodeType code : {CodeType::kE4M3, CodeType::kE5M2}) all.push_back(format(code, Scaling::kFloat32, tiles));
  }
  for (const CodeType code : {CodeType::kE4M3, CodeType::kE5M2}) all.push_back(format(code, Scaling::kTensor, false));
  all.push_back(line_format(CodeType::kE4M3, ElementType::kF32));
  all.push_back(line_format(CodeType::kE5M2, ElementType::kBF16));
  for (const ElementType type : kTypes) all.push_back(line_format(CodeType::kInt8, type));
  for (const int block : {32, 128}) all.push_back(int4_format(block, ElementType::kF16));
  for (const int block : {64, 256}) all.push_back(int4_format(block, ElementType::kBF16));
  return all;
}

inline std::string name(const Format& f) {
  const char* const scalings[] = {"two-level", "e8m0", "float32", "tensor", "float16", "rows "};
  const std::string code = f.code == CodeType::kInt8 ? "int8"
                           : f.code == CodeType::kInt4
                               ? "int4"
                               : with_float(f.code, [](auto element) { return decltype(element)::kName; });
  return code + "/" + scalings[static_cast<int>(f.scaling)] +
         (f.tiles                       ? " tiles"
          : f.scaling == Scaling::kRows ? name(f.scale_type)
                                        : "");
}

/// K as it is stored: whole blocks of packed codes.
inline int64_t stored(const Format& f, int64_t depth) { return f.packed() ? f.blocks(depth) * f.block : depth; }

inline bool supported(const Format& a, const Format& b, int64_t depth = 33) {
  MatmulProblem p{};
  p.a.format = a, p.b.format = b, p.a.columns = stored(a, depth), p.b.columns = stored(b, depth);
  return matmul_supports(p);
}

inline std::vector<std::pair<Format, Format>> supported_pairs() {
  std::vector<std::pair<Format, Format>> pairs;
  for (const Format& a : formats())
    for (const Format& b : formats())
      if (supported(a, b)) pairs.push_back({a, b});
  return pairs;
}

// --- numbers

/// What the operands of one batch entry look like.
struct Numbers {
  const char* name;
  bool any_code;           // NaN and infinity among 8-bit codes
  float a_amax, b_amax;    // two-level
  bool any_scale;          // bytes: negative, NaN, zero blocks and both ends of the range
  float a_scale, b_scale;  // float32 scales are about this large
};
constexpr Numbers kNumbers[] = {{"ordinary", false, 3, 0.7f, false, 1, 1},
                                {"any scale", false, 1, 5, true, 1e-28f, 1e3f},
                                {"NaN among codes", true, 2, 2, false, 1e3f, 1e3f},
                                {"underflow", false, 1e-20f, 1e-20f, false, 1e-28f, 1e-8f},
                                {"subnormal scale", false, 1e-39f, 1e30f, false, 1e-39f, 1e30f},
                                {"overflow", false, 1e25f, 1e25f, true, 1e20f, 1e20f},
                                {"everything", true, kNaN, 1, true, kNaN, 1},
                                {"zero", false, 0, 3, false, 0, 3}};

struct OperandBuffers {
  Format format;
  int64_t rows, columns;
  Buffer data, scale, amax;

  OperandBuffers(const Format& format, int64_t batch, int64_t rows, int64_t depth)
      : format(format),
        rows(rows),
        columns(stored(format, depth)),
        data(batch * rows * format.row_bytes(columns)),
        scale(batch * format.scales(rows, columns) * format.scale_bytes()),
        amax(batch * 4) {}

  /// Fills one of two batch entries.
  void fill(int batch, const Numbers& numbers, bool is_a, std::mt19937& random) const {
    const int64_t bytes = data.size() / 2, scales = format.scales(rows, columns);
    const uint32_t finite = format.code == CodeType::kE5M2 ? 0x7C : 0x7F;
    const int64_t special = numbers.any_code ? static_cast<int64_t>(random() % bytes) : -1;
    for (int64_t i = 0; i < bytes; ++i) {
      uint32_t code = random() & 0xFF;
      if (format.code == CodeType::kInt8)
        code = is_a && code == 0x80 ? 0 : code;  // a's are within +-127
      else if (!format.packed())
        code = (code & 0x80) | (i == special ? finite + random() % (0x80 - finite) : code % finite);
      data.as()[batch * bytes + i] = static_cast<uint8_t>(code);
    }
    amax.as<float>()[batch] = is_a ? numbers.a_amax : numbers.b_amax;
    const float size = is_a ? numbers.a_scale : numbers.b_scale;
    for (int64_t i = batch * scales; i < (batch + 1) * scales; ++i) {
      const bool any = numbers.any_scale && random() % 4 == 0;
      if (format.scaling == Scaling::kTwoLevel)
        scale.as()[i] = static_cast<uint8_t>(any ? random() : random() % kFloat8NaN);
      else if (format.scaling == Scaling::kE8M0)
        scale.as()[i] = static_cast<uint8_t>(any ? (random() % 8 ? random() % 254 : kE8M0NaN) : 117 + random() % 20);
      else
        reference::put(scale.as(), format.scale_bytes() == 2 ? format.scale_type : ElementType::kF32, i,
                       any && random() % 8 == 0 ? kNaN : size * static_cast<float>(1 + random() % 1000) / 512);
    }
  }
  MatmulOperand operand() const {
    return {format, data.as(), scale.as(), format.scaling == Scaling::kTwoLevel ? amax.as<float>() : nullptr, columns};
  }
};

struct Shape {
  int64_t rows, columns, depth;
};

/// One matrix by one matrix with ordinary numbers, float32 results.
struct Product {
  OperandBuffers a, b;

  Product(const std::pair<Format, Format>& formats, Shape shape, const Numbers& numbers, std::mt19937& random)
      : a(formats.first, 2, shape.rows, shape.depth), b(formats.second, 2, shape.columns, shape.depth) {
    for (const int i : {0, 1}) a.fill(i, numbers, true, random), b.fill(i, numbers, false, random);
  }
  MatmulProblem problem(const Buffer& result) const {
    MatmulProblem p{};
    p.a = a.operand(), p.b = b.operand(), p.batch = 1, p.rows = a.rows, p.columns = b.rows;
    p.result = result.as(), p.type = ElementType::kF32;
    return p;
  }
};

/// Every instruction set's float32 result is the reference's, byte for byte.
inline void check_all_kernels(const Product& product, const Shape& shape) {
  const Buffer expected(shape.rows * shape.columns * 4), found(expected.size());
  MatmulProblem p = product.problem(found);
  reference::matmul(p, expected.as(), nullptr);
  for (const Kernels* k : kernels_under_test()) {
    const check::Given isa(k->isa);
    run_chunks(*k, p, false);
    CHECK_EQ(first_difference(found, expected, p.type), -1);
  }
}

}  // namespace jaxlowprec
