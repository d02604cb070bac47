// Weight-only GEMMs: the bytes of every instruction set are those of the rule written out one element at a time, whatever
// the sizes, the format, the type of the activations and the order of the chunks; and no byte beyond a buffer's end is read.
#include <array>

#include "format_makers.h"
#include "kernel_runs.h"
#include "matmul_reference.h"

using namespace jaxlowprec;

namespace {

Format int4(int32_t group, ElementType scale_type = ElementType::kBF16) {
  return {CodeType::kInt4, Scaling::kFloat16, group, false, ScaleRule::kUp, false, 0, scale_type};
}

struct Kind {
  std::string name;
  Format format;
  bool zero_points = false;
};

const Kind kKinds[] = {
    {"Int4 128", int4(128)},
    {"Int4 32, zero points", int4(32), true},
    {"Int4 64, float16", int4(64, ElementType::kF16)},
    {"Int4 96, float16, zero points", int4(96, ElementType::kF16), true},
    {"Int4 16", int4(16)},
    {"Int4 7, zero points", int4(7), true},
    {"Int4 5, float16", int4(5, ElementType::kF16)},
    {"Int4 2, float16", int4(2, ElementType::kF16)},
    {"Int4 1, zero points", int4(1), true},
    {"NVFP4", nvfp4()},
    {"NVFP4 16x16", nvfp4(true)},
    {"MXFP4", mx(CodeType::kE2M1)},
    {"MXFP4 32x32", mx(CodeType::kE2M1, true)},
    {"MXFP8", mx(CodeType::kE4M3)},
    {"MXFP8 E5M2", mx(CodeType::kE5M2)},
    {"MXFP8 E5M2 32x32", mx(CodeType::kE5M2, true)},
    {"FP8 blocks", float8_block(CodeType::kE4M3, false, false)},
    {"FP8 tiles", float8_block(CodeType::kE5M2, true)},
    {"FP8 tensor", float8_tensor(CodeType::kE4M3)},
};

struct Shape {
  int64_t batch, rows, columns, depth;
};

/// Operands of bits that are numbers, codes one byte off their alignment.
struct Case {
  Kind kind;
  WeightOnlyProblem p{};
  Buffer x, data, scale, zero, amax, result;

  Case(const Kind& kind, Shape s, ElementType x_type, std::mt19937& random)
      : kind(kind),
        x(s.batch * s.rows * s.depth * reference::element_size(x_type)),
        data(s.batch * s.columns * kind.format.row_bytes(s.depth), 1),
        scale(s.batch * kind.format.scales(s.columns, s.depth) * kind.format.scale_bytes()),
        zero(kind.zero_points ? s.batch * kind.format.scales(s.columns, s.depth) : 0),
        amax(4 * s.batch),
        result(4 * s.batch * s.rows * s.columns) {
    const Format& f = kind.format;
    fill_elements(x.as(), x_type, 0, s.batch * s.rows * s.depth, Data::kNormal, random);
    for (int64_t i = 0; i < data.size(); ++i) data.as()[i] = static_cast<uint8_t>(random()) & (f.packed() ? 0xFF : 0xBB);
    for (int64_t i = 0; i < zero.size(); ++i) zero.as()[i] = random() % 16;
    for (int64_t i = 0; i < s.batch; ++i) amax.as<float>()[i] = 1 + 0.3f * i;
    const int64_t scales = scale.size() / f.scale_bytes();
    for (int64_t i = 0; i < scales; ++i) {
      const float number = std::ldexp(1 + random() % 256 / 256.0f, static_cast<int>(random() % 9) - 8);
      if (f.scale_bytes() == 4)
        scale.as<float>()[i] = number;
      else if (f.scale_bytes() == 2)
        reference::put(scale.as(), f.scale_type, i, number);
      else
        scale.as()[i] = f.scaling == Scaling::kE8M0 ? 110 + random() % 20 : random() % 0x7F;
    }
    p.batch = s.batch, p.rows = s.rows, p.columns = s.columns, p.depth = s.depth;
    p.x = x.as(), p.x_type = x_type, p.result = result.as(), p.type = ElementType::kF32, p.threads = 3;
    p.weight = {f, data.as(), scale.as(), f.scaling == Scaling::kTwoLevel ? amax.as<float>() : nullptr, s.depth};
    p.zero_point = kind.zero_points ? zero.as() : nullptr;
  }
};

/// Element k of column n's weight, without the tensor's scale.
float weight(const WeightOnlyProblem& p, int64_t batch, int64_t n, int64_t k) {
  const Format& f = p.weight.format;
  if (f.scaling == Scaling::kTensor) return reference::decoded_code(p.weight, p.columns, batch, n, k);
  if (f.code != CodeType::kInt4)
    return reference::multiply(reference::decoded_code(p.weight, p.columns, batch, n, k),
                               reference::decoded_scale(p.weight, p.columns, batch, n, k / f.block));
  const int64_t line = batch * p.columns + n, group = line * f.blocks(p.depth) + k / f.block;
  const int code = static_cast<int>(reference::code_at(p.weight.data + line * f.row_bytes(p.depth), k));
  const float steps = static_cast<float>(code - (p.zero_point ? p.zero_point[group] : 8));
  const float scale = reference::get(p.weight.scale, f.scale_type, group);
  const float exact = std::isfinite(scale) ? reference::multiply(steps, scale) : NAN;
  return reference::number(reference::rounded_bits(exact, f.scale_type), f.scale_type);
}

void multiply(const WeightOnlyProblem& p, float* result) {
  std::vector<float> w(p.columns * p.depth);
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t i = 0; i < p.columns * p.depth; ++i) w[i] = weight(p, batch, i / p.depth, i % p.depth);
    float alpha = 1;
    if (p.weight.amax) alpha = p.weight.amax[batch] * static_cast<float>(1.0 / 2688);
    if (p.weight.format.scaling == Scaling::kTensor) memcpy(&alpha, p.weight.scale + 4 * batch, 4);
    for (int64_t m = 0; m < p.rows; ++m)
      for (int64_t n = 0; n < p.columns; ++n) {
        std::array<float, 16> lanes{};
        for (int64_t k = 0; k < p.depth; ++k)
          lanes[k % 16] = reference::fused_multiply_add(reference::get(p.x, p.x_type, (batch * p.rows + m) * p.depth + k),
                                                        w[n * p.depth + k], lanes[k % 16]);
        for (int half = 8; half > 0; half /= 2)
          for (int j = 0; j < half; ++j) lanes[j] = reference::add(lanes[j], lanes[j + half]);
        *result++ = reference::multiply(lanes[0], alpha);
      }
  }
}

/// All kernels' bytes are those of the rule.
void check_bytes(const Case& c) {
  std::vector<float> wanted(c.p.batch * c.p.rows * c.p.columns);
  multiply(c.p, wanted.data());
  for_all_runs([&](const Kernels& k, bool scrambled) {
    memset(c.result.as(), 0xA5, c.result.size());
    run_chunks(k, c.p, scrambled);
    CHECK_EQ(first_difference(c.result.as(), wanted.data(), ElementType::kF32, wanted.size()), -1);
  });
}

}  // namespace

TEST(weight_only_bytes_are_the_rules) {
  std::mt19937 random(1);
  std::vector<Shape> shapes = {{1, 1, 37, 520}, {2, 5, 19, 77}, {1, 4, 1, 96}, {1, 1, 5, 96}};  // and few columns
  const Shape largest = kSanitized ? Shape{1, 70, 37, 520} : Shape{1, 70, 100, 1100};
  const Shape widest = {1, 6, 2500, 40},
              deepest = {1, 6, 13, 4096 + 2048 + 100};  // more than a chunk's columns and a span of K
  if (!kReduced) shapes.insert(shapes.end(), {{1, 2, 70, 1000}, {2, 4, 33, 64}, largest, {1, 3, 5, 1}, widest, deepest});
  for (const Kind& kind : kKinds)
    for (const Shape& shape : shapes)
      for (const ElementType type : kTypes) {
        if (kReduced && type == ElementType::kF16) continue;
        const check::Given given(kind.name + ", " + name(type) + ", rows " + std::to_string(shape.rows) + ", depth " +
                                 std::to_string(shape.depth));
        const Case c(kind, shape, type, random);
        check_bytes(c);
      }
}

TEST(weight_only_every_code_by_every_scale) {
  std::mt19937 random(3);
  const uint32_t step = kReduced || kSanitized ? 37 : 1;  // of what memory is read and written, no number decides
  const std::vector<uint32_t> powers = {0, 1, 9, 26, 27, 28, 126, 127, 128, 226, 227, 228, 246, 254, 255};  // of 8-bit codes
  std::vector<uint32_t> bytes, words;  // words: of upper bytes about the ends of the range and in its middle
  for (uint32_t i = 0; i < 256; i += step) bytes.push_back(i);
  for (const uint32_t upper : {0x00, 0x04, 0x3C, 0x3F, 0x40, 0x7B, 0x7C, 0x7D, 0x7E, 0x7F, 0x80, 0xBF, 0xFD, 0xFF})
    for (uint32_t lower = 0; lower < 256; lower += upper == 0x3F ? step : 5 * step) words.push_back(upper << 8 | lower);
  for (const Kind& kind : kKinds) {
    const Format& f = kind.format;
    if (f.tiles || (!f.packed() && f.scaling != Scaling::kE8M0)) continue;
    const check::Given given(kind.name);
    const auto& scales = !f.packed() ? powers : f.scale_bytes() == 2 ? words : bytes;
    const int64_t codes = f.packed() ? 16 : 256, columns = codes * static_cast<int64_t>(scales.size()),
                  depth = f.block;  // a code and a scale per column
    for (const auto& [rows, type] : {std::pair(1, ElementType::kF32), {5, ElementType::kF32}, {1, ElementType::kBF16}}) {
      const Case c(kind, {1, rows, columns, depth}, type, random);
      for (int64_t i = 0; i < rows * depth; ++i) reference::put(c.x.as(), type, i, 1.0f);
      for (int64_t n = 0; n < columns; ++n) {
        memset(c.data.as() + n * f.row_bytes(depth), (f.packed() ? 0x11 : 1) * (n % codes), f.row_bytes(depth));
        memcpy(c.scale.as() + n * f.scale_bytes(), &scales[n / codes], f.scale_bytes());
      }
      check_bytes(c);
    }
  }
}

TEST(weight_only_row_does_not_depend_on_the_other_rows_nor_on_the_threads) {
  std::mt19937 random(2);
  const int64_t rows = kReduced ? 9 : 80, columns = 70, depth = 600;
  for (const Kind& kind : kKinds)
    for (const ElementType type : {ElementType::kF32, ElementType::kBF16}) {
      const check::Given given(kind.name + ", " + name(type));
      const Case c(kind, {1, rows, columns, depth}, type, random);
      for (const Kernels* k : kernels_under_test()) {
        run_chunks(*k, c.p, false);
        for (const int64_t count : {1, 2, 3, 4, 5, 8}) {
          const int64_t first = random() % (rows - count + 1);
          const Buffer some(4 * count * columns);
          WeightOnlyProblem p = c.p;
          p.rows = count, p.threads = count, p.result = some.as();
          p.x = c.x.as() + first * depth * reference::element_size(type);
          run_chunks(*k, p, true);
          CHECK_EQ(memcmp(some.as(), c.result.as<float>() + first * columns, some.size()), 0);
        }
      }
    }
}
