// The GEMMs of every instruction set against matmul_reference.h, byte for byte: all pairs of formats, over ragged shapes,
// epilogues and hostile numbers. All are held to the same bytes, so instruction sets agree with each other.
#include "matmul_operands.h"

namespace jaxlowprec {
namespace {

TEST(matmul_supports_the_pairs_of_the_rules_and_no_others) {
  const Format nvfp4 = format(CodeType::kE2M1, Scaling::kTwoLevel, false),
               mxfp4 = format(CodeType::kE2M1, Scaling::kE8M0, true);
  const Format mxfp8 = format(CodeType::kE4M3, Scaling::kE8M0, false), wide = format(CodeType::kE5M2, Scaling::kE8M0, false);
  const Format rows = format(CodeType::kE4M3, Scaling::kFloat32, false),
               tiles = format(CodeType::kE4M3, Scaling::kFloat32, true);
  CHECK(supported(nvfp4, nvfp4) && supported(mxfp4, mxfp4) && supported(mxfp4, mxfp8) && supported(wide, mxfp4));
  CHECK(supported(rows, rows) && supported(rows, tiles) && supported(tiles, rows) && supported(wide, mxfp8));
  CHECK(!supported(tiles, tiles) && !supported(wide, wide) && !supported(nvfp4, mxfp4) && !supported(mxfp8, rows));
  CHECK(supported(rows, mxfp4) && !supported(tiles, mxfp4) && !supported(mxfp4, rows) && !supported(rows, mxfp8));
  const Format lines = line_format(CodeType::kE4M3, ElementType::kF32),
               int8 = line_format(CodeType::kInt8, ElementType::kF32);
  CHECK(supported(lines, lines) && supported(int8, int8) && !supported(lines, int8) && !supported(int8, lines));
  const Format int4 = int4_format(128, ElementType::kBF16);
  CHECK(supported(int8, int4) && supported(int8, mxfp4) && !supported(int4, int8) && !supported(mxfp4, int8));
  CHECK(!supported(lines, int4) && !supported(int8, nvfp4) && !supported(int8, int4_format(48, ElementType::kBF16)));
  CHECK(supported(int8, int8, kMostInt8Depth) && !supported(int8, int8, kMostInt8Depth + 1));
  CHECK_EQ(supported_pairs().size(), size_t{4 + (36 - 4) + (16 - 4 - 3) + 4 + 3 + 3 + 9 + 18});
  Format floor = mxfp8;
  floor.scale_rule = ScaleRule::kFloor;  // how scales were chosen does not matter
  CHECK(supported(mxfp8, floor));
  MatmulProblem p{};
  p.a = {mxfp8, nullptr, nullptr, nullptr, 33}, p.b = {wide, nullptr, nullptr, nullptr, 34};
  CHECK(!matmul_supports(p));
}

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
