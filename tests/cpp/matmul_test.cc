// The GEMMs of every instruction set against matmul_reference.h, byte for byte: all pairs of formats, over ragged shapes,
// epilogues and hostile numbers. All are held to the same bytes, so instruction sets agree with each other.
#include "format_makers.h"
#include "kernel_runs.h"
#include "matmul_reference.h"

namespace jaxlowprec {
namespace {

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

std::vector<Format> formats() {
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
  all.push_back(int4_format(128, ElementType::kBF16)), all.push_back(int4_format(32, ElementType::kF16));
  return all;
}

std::string name(const Format& f) {
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
int64_t stored(const Format& f, int64_t depth) { return f.packed() ? f.blocks(depth) * f.block : depth; }

bool supported(const Format& a, const Format& b, int64_t depth = 33) {
  MatmulProblem p{};
  p.a.format = a, p.b.format = b, p.a.columns = stored(a, depth), p.b.columns = stored(b, depth);
  return matmul_supports(p);
}

std::vector<std::pair<Format, Format>> supported_pairs() {
  std::vector<std::pair<Format, Format>> pairs;
  for (const Format& a : formats())
    for (const Format& b : formats())
      if (supported(a, b)) pairs.push_back({a, b});
  return pairs;
}

TEST(matmul_supports_the_pairs_of_the_rules_and_no_others) {
  const Format nvfp4 = format(CodeType::kE2M1, Scaling::kTwoLevel, false),
               mxfp4 = format(CodeType::kE2M1, Scaling::kE8M0, true);
  const Format mxfp8 = format(CodeType::kE4M3, Scaling::kE8M0, false), wide = format(CodeType::kE5M2, Scaling::kE8M0, false);
  const Format rows = format(CodeType::kE4M3, Scaling::kFloat32, false),
               tiles = format(CodeType::kE4M3, Scaling::kFloat32, true);
  CHECK(supported(nvfp4, nvfp4) && supported(mxfp4, mxfp4) && supported(mxfp4, mxfp8) && supported(wide, mxfp4));
  CHECK(supported(rows, rows) && supported(rows, tiles) && supported(tiles, rows) && supported(wide, mxfp8));
  CHECK(!supported(tiles, tiles) && !supported(wide, wide) && !supported(nvfp4, mxfp4) && !supported(mxfp8, rows));
  const Format lines = line_format(CodeType::kE4M3, ElementType::kF32),
               int8 = line_format(CodeType::kInt8, ElementType::kF32);
  CHECK(supported(lines, lines) && supported(int8, int8) && !supported(lines, int8) && !supported(int8, lines));
  const Format int4 = int4_format(128, ElementType::kBF16);
  CHECK(supported(int8, int4) && supported(int8, mxfp4) && !supported(int4, int8) && !supported(mxfp4, int8));
  CHECK(!supported(lines, int4) && !supported(int8, nvfp4) && !supported(int8, int4_format(48, ElementType::kBF16)));
  CHECK(supported(int8, int8, kMostInt8Depth) && !supported(int8, int8, kMostInt8Depth + 1));
  CHECK_EQ(supported_pairs().size(), size_t{4 + (36 - 4) + (16 - 4 - 3) + 3 + 3 + 9 + 12});
  Format floor = mxfp8;
  floor.scale_rule = ScaleRule::kFloor;  // how scales were chosen does not matter
  CHECK(supported(mxfp8, floor));
  MatmulProblem p{};
  p.a = {mxfp8, nullptr, nullptr, nullptr, 33}, p.b = {wide, nullptr, nullptr, nullptr, 34};
  CHECK(!matmul_supports(p));
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

// --- all of it against the reference

struct Epilogue {
  const char* name;
  bool bias;
  Activation activation;
  bool pre_activation, accumulate;
};
constexpr Epilogue kEpilogues[] = {{"plain", false, Activation::kNone, false, false},
                                   {"bias", true, Activation::kNone, false, false},
                                   {"accumulate", false, Activation::kNone, false, true},
                                   {"gelu", false, Activation::kGeluTanh, false, false},
                                   {"bias, gelu, pre-activation", true, Activation::kGeluTanh, true, false},
                                   {"bias, gelu, pre-activation, accumulate", true, Activation::kGeluTanh, true, true},
                                   {"gelu gradient", false, Activation::kGeluTanhGradient, false, false},
                                   {"bias, gelu gradient, accumulate", true, Activation::kGeluTanhGradient, false, true}};

struct Shape {
  int64_t rows, columns, depth;
};

struct Case {
  Shape shape;
  ElementType type, other_type;  // of the result; of what is accumulated onto and of the gradient's input
  Epilogue epilogue;
};

void check_matmul(const std::pair<Format, Format>& formats, const Case& c, const Numbers* const (&numbers)[2],
                  std::mt19937& random) {
  const int64_t batch = 2, elements = batch * c.shape.rows * c.shape.columns;
  const int64_t bytes = elements * reference::element_size(c.type);
  const OperandBuffers a(formats.first, batch, c.shape.rows, c.shape.depth);
  const OperandBuffers b(formats.second, batch, c.shape.columns, c.shape.depth);
  for (int i = 0; i < batch; ++i) a.fill(i, *numbers[i], true, random), b.fill(i, *numbers[i], false, random);
  const Buffer bias(batch * c.shape.columns * 4), other(elements * reference::element_size(c.other_type));
  fill_elements(bias.as(), ElementType::kF32, 0, batch * c.shape.columns, Data::kSparse, random);
  fill_elements(other.as(), c.other_type, 0, elements, random() % 4 ? Data::kSparse : Data::kInfinity, random);

  MatmulProblem p{};
  p.a = a.operand(), p.b = b.operand();
  p.batch = batch, p.rows = c.shape.rows, p.columns = c.shape.columns, p.type = c.type;
  p.activation = c.epilogue.activation;
  if (c.epilogue.bias) p.bias = bias.as<float>();
  if (c.epilogue.accumulate) p.accumulate = other.as(), p.accumulate_type = c.other_type;
  if (p.activation == Activation::kGeluTanhGradient) p.activation_input = other.as(), p.activation_input_type = c.other_type;
  const Buffer expected(bytes), expected_before(bytes);
  reference::matmul(p, expected.as(), c.epilogue.pre_activation ? expected_before.as() : nullptr);
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer found(bytes), before(bytes);
    p.result = found.as(), p.pre_activation = c.epilogue.pre_activation ? before.as() : nullptr;
    p.threads = scrambled ? 16 : 1;
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(found, expected, p.type), -1);
    CHECK_EQ(first_difference(before, expected_before, p.type), -1);
  });
}

/// Calls visit with epilogues, types and numbers that change from case to case, so that many cases meet all of them.
class Turns {
 public:
  template <class Visit>
  void next(Shape shape, Visit visit) {
    const size_t count = std::size(kNumbers), epilogues = std::size(kEpilogues);
    const Numbers* const numbers[2] = {&kNumbers[turn_ % count], &kNumbers[turn_ / count % count]};
    const Case c = {shape, kTypes[turn_ % 3], kTypes[turn_ / 3 % 3], kEpilogues[turn_ / 5 % epilogues]};
    ++turn_;
    const check::Given given(std::to_string(shape.rows) + "x" + std::to_string(shape.columns) + "x" +
                             std::to_string(shape.depth) + ", " + name(c.type) + ", " + c.epilogue.name + " " +
                             name(c.other_type) + ", " + numbers[0]->name + "; " + numbers[1]->name);
    visit(c, numbers);
  }

 private:
  size_t turn_ = 0;
};

/// `cases` of each pair of formats in each shape, or one of a `-cases`-th of them.
void agrees_with_the_reference(const std::vector<Shape>& shapes, int cases) {
  std::mt19937 random(5);
  Turns turns;
  for (const auto& formats : supported_pairs())
    for (const Shape shape : shapes)
      for (int i = 0; i < std::max(cases, 1); ++i) {
        if ((cases < 0 && random() % -cases) || (kReduced && random() % 4)) continue;
        const check::Given given(name(formats.first) + " by " + name(formats.second));
        turns.next(shape, [&](const Case& c, const auto& numbers) { check_matmul(formats, c, numbers, random); });
      }
}

TEST(matmul_agrees_with_the_reference) {
  agrees_with_the_reference({{1, 1, 1},
                             {1, 16, 33},
                             {2, 31, 32},
                             {16, 1, 31},
                             {17, 33, 129},
                             {5, 70, 127},
                             {3, 130, 2},
                             {1, 300, 257},
                             {7, 128, 300},
                             {12, 9, 65},
                             {6, 40, 64},
                             {4, 17, 128}},
                            4);
}

TEST(matmul_agrees_with_the_reference_over_many_chunks_and_steps) {
  agrees_with_the_reference({{130, 258, 33}, {33, 300, 130}, {40, 24, 900}, {300, 70, 31}, {64, 64, 529}, {13, 35, 1057}},
                            -4);
}

TEST(matmul_agrees_with_the_reference_under_every_epilogue_and_type) {
  std::mt19937 random(6);
  Turns turns;
  const Scaling scalings[] = {Scaling::kTwoLevel, Scaling::kE8M0, Scaling::kTensor};
  for (const Scaling scaling : scalings) {
    const Format f = format(scaling == Scaling::kTensor ? CodeType::kE4M3 : CodeType::kE2M1, scaling, false);
    for (int i = 0; i < (kReduced ? 40 : 360); ++i)
      turns.next({9, 35, 40}, [&](const Case& c, const auto& numbers) { check_matmul({f, f}, c, numbers, random); });
  }
}

// --- claims of numerics.md 9 that do not need the reference

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

TEST(matmul_row_does_not_depend_on_the_other_rows) {
  std::mt19937 random(7);
  const int64_t rows = kReduced ? 19 : 300, columns = 70;
  for (const auto& formats : supported_pairs()) {
    if (formats.first.tiles || formats.second.tiles) continue;
    const check::Given given(name(formats.first) + " by " + name(formats.second));
    const Product product(formats, {rows, columns, 300}, kNumbers[0], random);
    const Format& f = formats.first;
    for (const Kernels* k : kernels_under_test()) {
      const Buffer all(rows * columns * 4);
      run_chunks(*k, product.problem(all), false);
      for (const int64_t count : {1, 2, 3, 5, 13}) {
        const int64_t first = random() % (rows - count + 1);
        const Buffer some(count * columns * 4);
        MatmulProblem p = product.problem(some);
        p.rows = count;
        p.a.data += first * f.row_bytes(p.a.columns);
        if (f.scaling != Scaling::kTensor) p.a.scale += first * f.scale_columns(p.a.columns) * f.scale_bytes();
        run_chunks(*k, p, false);
        CHECK_EQ(memcmp(some.as(), all.as<float>() + first * columns, some.size()), 0);
      }
    }
  }
}

TEST(matmul_is_within_the_bound_of_double_precision) {
  std::mt19937 random(8);
  const Shape shape = {10, 40, 300};
  for (const auto& formats : supported_pairs())
    for (const float magnitude : {1e-28f, 1.0f, 1e3f}) {
      const check::Given given(name(formats.first) + " by " + name(formats.second) + " at " + std::to_string(magnitude));
      const Product product(formats, shape, {"", false, magnitude, 2, false, magnitude, 2}, random);
      const Buffer result(shape.rows * shape.columns * 4);
      const MatmulProblem p = product.problem(result);
      const double alpha = p.a.amax ? static_cast<double>(*p.a.amax) * *p.b.amax / 7225344 : 1;
      const auto decoded = [&](const MatmulOperand& o, int64_t rows, int64_t row, int64_t k) {
        const bool one = o.format.scaling == Scaling::kTensor || o.format.scaling == Scaling::kRows;
        const int64_t block = one ? 0 : k / o.format.block;
        return static_cast<double>(reference::decoded_code(o, rows, 0, row, k)) *
               reference::decoded_scale(o, rows, 0, row, block);
      };
      std::vector<double> exact, bound;
      for (int64_t m = 0; m < shape.rows; ++m)
        for (int64_t n = 0; n < shape.columns; ++n) {
          double sum = 0, size = 0;
          for (int64_t k = 0; k < p.depth(); ++k) {
            const double term = decoded(p.a, shape.rows, m, k) * decoded(p.b, shape.columns, n, k) * alpha;
            sum += term, size += std::fabs(term);
          }
          exact.push_back(sum), bound.push_back(std::ldexp(size * shape.depth, -24));
        }
      for (const Kernels* k : kernels_under_test()) {
        run_chunks(*k, p, false);
        for (size_t i = 0; i < exact.size(); ++i) CHECK(std::fabs(result.as<float>()[i] - exact[i]) <= bound[i]);
      }
    }
}

TEST(matmul_keeps_a_poisoned_block_to_its_own_rows_and_columns) {
  std::mt19937 random(9);
  const Shape shape = {70, 80, 300};
  for (const auto& formats : supported_pairs()) {
    const Format &f = formats.first, &g = formats.second;
    if (f.scaling == Scaling::kTensor || f.scaling == Scaling::kTwoLevel) continue;
    const check::Given given(name(f) + " by " + name(g));
    const Product product(formats, shape, kNumbers[0], random);
    const auto poison = [&](const OperandBuffers& operand, int64_t row, int64_t block) {
      const Format& format = operand.format;
      const int64_t at = (format.tiles ? row / format.block : row) * format.scale_columns(operand.columns) + block;
      if (format.scale_bytes() == 1)
        operand.scale.as()[at] = kE8M0NaN;
      else
        reference::put(operand.scale.as(), format.scale_bytes() == 2 ? format.scale_type : ElementType::kF32, at, kNaN);
    };
    const auto poisoned = [](const Format& format, int64_t row, int64_t where) {
      return format.tiles ? row / format.block == where / format.block : row == where;
    };
    const auto block = [](const Format& format, int which) { return format.scaling == Scaling::kRows ? 0 : which; };
    poison(product.a, 37, block(f, 1)), poison(product.b, 66, block(g, 2));
    const Buffer result(shape.rows * shape.columns * 4);
    for (const Kernels* k : kernels_under_test()) {
      run_chunks(*k, product.problem(result), false);
      for (int64_t m = 0; m < shape.rows; ++m)
        for (int64_t n = 0; n < shape.columns; ++n)
          CHECK_EQ(std::isnan(result.as<float>()[m * shape.columns + n]), poisoned(f, m, 37) || poisoned(g, n, 66));
    }
  }
}

TEST(matmul_of_mxfp4_at_both_ends_of_the_scales_is_exact) {
  const Format f = format(CodeType::kE2M1, Scaling::kE8M0, false);
  const Buffer data(32), scale(2), result(4);  // one row of two blocks, by itself
  memset(data.as(), 0x22, 32);                 // ones
  for (const int e : {-126, -100, -63, 0, 60}) {
    const check::Given given("scales 2^" + std::to_string(e));
    const Buffer inverse(2);
    scale.as()[0] = scale.as()[1] = static_cast<uint8_t>(e + 127),
    inverse.as()[0] = inverse.as()[1] = static_cast<uint8_t>(127 - e);
    MatmulProblem p{};
    p.a = {f, data.as(), scale.as(), nullptr, 64}, p.b = {f, data.as(), inverse.as(), nullptr, 64};
    p.batch = p.rows = p.columns = 1, p.result = result.as(), p.type = ElementType::kF32;
    for (const Kernels* k : kernels_under_test()) {
      run_chunks(*k, p, false);
      CHECK_EQ(*result.as<float>(), 64.0f);
    }
  }
}

/// Every instruction set's float32 result is the reference's, byte for byte.
static void check_all_kernels(const Product& product, const Shape& shape) {
  const Buffer expected(shape.rows * shape.columns * 4), found(expected.size());
  MatmulProblem p = product.problem(found);
  reference::matmul(p, expected.as(), nullptr);
  for (const Kernels* k : kernels_under_test()) {
    const check::Given isa(k->isa);
    run_chunks(*k, p, false);
    CHECK_EQ(first_difference(found, expected, p.type), -1);
  }
}

TEST(matmul_of_mxfp4_agrees_with_the_reference_where_one_block_has_an_extreme_scale) {
  const Format f = format(CodeType::kE2M1, Scaling::kE8M0, false);
  const Shape shape = {3, 40, 96};
  std::mt19937 random(10);
  for (const int byte : {0, 1, 76, 77, 177, 178, 254, 255})
    for (const uint8_t mask : {0x00, 0x88, 0xFF})  // codes of the block: zero, zero of either sign, any
      for (const bool in_a : {false, true}) {
        const check::Given given("scale " + std::to_string(byte) + (mask == 0xFF ? "" : " of zeros") +
                                 (in_a ? " in a" : " in b"));
        const Product product({f, f}, shape, kNumbers[0], random);
        const OperandBuffers& operand = in_a ? product.a : product.b;
        const int64_t block = 2 * (shape.depth / 32) + 1;  // the second of row 2
        operand.scale.as()[block] = static_cast<uint8_t>(byte);
        for (int i = 0; i < 16; ++i) operand.data.as()[16 * block + i] &= mask;
        check_all_kernels(product, shape);
      }
}

TEST(matmul_of_mxfp4_agrees_with_the_reference_where_scales_are_next_to_a_limit) {
  const Format f = format(CodeType::kE2M1, Scaling::kE8M0, false);
  const Shape shape = {9, 40, 96};
  std::mt19937 random(11);
  for (const auto& [a_byte, b_byte] : {std::pair(0, 122), {122, 0}, {76, 50}, {77, 77}, {40, 77}, {175, 175}, {250, 125}}) {
    const check::Given given("scales from " + std::to_string(a_byte) + " by " + std::to_string(b_byte));
    const Product product({f, f}, shape, kNumbers[0], random);
    for (int64_t i = 0; i < product.a.scale.size(); ++i)
      product.a.scale.as()[i] = static_cast<uint8_t>(a_byte + random() % 5);
    for (int64_t i = 0; i < product.b.scale.size(); ++i)
      product.b.scale.as()[i] = static_cast<uint8_t>(b_byte + random() % 5);
    check_all_kernels(product, shape);
  }
}

TEST(matmul_keeps_the_sign_of_sums_that_underflow) {
  const Format f = format(CodeType::kE4M3, Scaling::kE8M0, false);
  const Buffer codes(40), negative(40), scale(2), result(4);
  memset(codes.as(), 0x38, codes.size()), memset(negative.as(), 0xB8, negative.size());  // ones, and less than nothing
  memset(scale.as(), 127 - 90, scale.size());                                            // 2^-180 a product
  for (const int64_t depth : {1, 2, 3, 33, 40}) {
    const check::Given given(std::to_string(depth) + " products");
    MatmulProblem p{};
    p.a = {f, codes.as(), scale.as(), nullptr, depth}, p.b = {f, negative.as(), scale.as(), nullptr, depth};
    p.batch = p.rows = p.columns = 1, p.result = result.as(), p.type = ElementType::kF32;
    for (const Kernels* k : kernels_under_test()) {
      const check::Given isa(k->isa);
      run_chunks(*k, p, false);
      CHECK_EQ(Lanes<float>::bits(*result.as<float>()), 0x80000000u);
    }
  }
}

TEST(matmul_of_int8_is_exact_at_the_ends_of_codes_and_depth) {
  const Format f = line_format(CodeType::kInt8, ElementType::kF32);
  for (const auto& [a_code, b_code] : {std::pair(127, 127), {127, -128}, {-127, -128}, {-127, 127}, {-127, -127}})
    for (const int64_t depth : {int64_t{1}, int64_t{4099}, kReduced || kSanitized ? int64_t{1024} : kMostInt8Depth})
      for (const int64_t rows : {1, 2, 17}) {
        const check::Given given(std::to_string(a_code) + " by " + std::to_string(b_code) + ", " + std::to_string(rows) +
                                 "x" + std::to_string(depth));
        const int64_t columns = 19;
        const Buffer a(rows * depth), b(columns * depth), ones(4 * columns), result(4 * rows * columns);
        memset(a.as(), a_code, a.size()), memset(b.as(), b_code, b.size());
        std::fill_n(ones.as<float>(), columns, 1.0f);
        MatmulProblem p{};
        p.a = {f, a.as(), ones.as(), nullptr, depth}, p.b = {f, b.as(), ones.as(), nullptr, depth};
        p.batch = 1, p.rows = rows, p.columns = columns, p.result = result.as(), p.type = ElementType::kF32;
        for (const Kernels* k : kernels_under_test()) {
          const check::Given isa(k->isa);
          run_chunks(*k, p, false);
          for (int64_t i = 0; i < rows * columns; ++i)
            CHECK_EQ(result.as<float>()[i], static_cast<float>(depth * a_code * b_code));
        }
      }
}

TEST(matmul_of_int8_takes_rows_that_lie_apart) {  // as groups of a weight's gradient do
  std::mt19937 random(12);
  const Shape shape = {5, 37, 70};
  const Format f = line_format(CodeType::kInt8, ElementType::kBF16);
  const Product product({f, f}, shape, kNumbers[0], random);
  const int64_t stride = 2 * shape.depth, scale_stride = 6;
  const Buffer expected(shape.rows * shape.columns * 4), found(expected.size());
  MatmulProblem p = product.problem(found);
  reference::matmul(p, expected.as(), nullptr);
  const auto apart = [&](MatmulOperand& operand, int64_t rows, const Buffer& data, const Buffer& scale) {
    for (int64_t row = 0; row < rows; ++row) {
      memcpy(data.as() + row * stride, operand.data + row * shape.depth, shape.depth);
      memcpy(scale.as() + row * scale_stride, operand.scale + row * 2, 2);
    }
    operand.data = data.as(), operand.scale = scale.as();
    operand.given_data_stride = stride, operand.given_scale_stride = scale_stride;
  };
  const Buffer a(shape.rows * stride), a_scale(shape.rows * scale_stride), b(shape.columns * stride),
      b_scale(shape.columns * scale_stride);
  apart(p.a, shape.rows, a, a_scale), apart(p.b, shape.columns, b, b_scale);
  for (const Kernels* k : kernels_under_test()) {
    const check::Given isa(k->isa);
    run_chunks(*k, p, false);
    CHECK_EQ(first_difference(found, expected, p.type), -1);
  }
}

#if defined(JLP_TEST_EMULATED_BF16)
TEST(emulated_dot_product_is_what_a_processor_has_to_have) { CHECK(avx512_bf16::dot_gives_the_same_bytes()); }
#else
TEST(bf16_kernels_are_there_where_the_processor_has_the_instructions) {
#if defined(__x86_64__)
  const std::vector<std::string> isas = available_isas();
  const bool found = std::find(isas.begin(), isas.end(), "avx512_bf16") != isas.end();
  const bool avx512 = std::find(isas.begin(), isas.end(), "avx512") != isas.end();
  CHECK_EQ(found, avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"));
#endif
}

TEST(amx_kernels_are_the_first_choice_where_they_can_run) {
  const std::vector<std::string> isas = available_isas();
  if (std::find(isas.begin(), isas.end(), "avx512_amx") != isas.end()) CHECK_EQ(isas.front(), std::string("avx512_amx"));
}
#endif

TEST(matmul_gradient_of_gelu_at_infinity_is_a_finite_factor) {
  const Format f = format(CodeType::kE4M3, Scaling::kTensor, false);
  const Buffer codes(3), unit(4), result(12);
  memset(codes.as(), 0x38, 3), *unit.as<float>() = 1;  // ones
  const float input[3] = {kInfinity, -kInfinity, 0};
  MatmulProblem p{};
  p.a = {f, codes.as(), unit.as(), nullptr, 1}, p.b = {f, codes.as(), unit.as(), nullptr, 1};
  p.batch = p.rows = 1, p.columns = 3, p.result = result.as(), p.type = ElementType::kF32;
  p.activation = Activation::kGeluTanhGradient, p.activation_input = input, p.activation_input_type = ElementType::kF32;
  for (const Kernels* k : kernels_under_test()) {
    run_chunks(*k, p, false);
    const float expected[3] = {1, 0, 0.5f};
    for (int i = 0; i < 3; ++i) CHECK_EQ(result.as<float>()[i], expected[i]);
  }
}

}  // namespace
}  // namespace jaxlowprec
