// What numerics.md 9 and 18 promise of GEMMs, and sums at both ends of numbers, by the kernels of every instruction set.
#include "matmul_operands.h"

namespace jaxlowprec {
namespace {

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
  const Shape shape = {70, 80, 600};
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

TEST(matmul_of_float8_blocks_by_mxfp4_is_that_by_blocks_with_scales_of_one) {
  const Format blocks = format(CodeType::kE4M3, Scaling::kFloat32, false),
               mxfp4 = format(CodeType::kE2M1, Scaling::kE8M0, false);
  std::mt19937 random(13);
  for (const Shape shape : {Shape{3, 40, 256}, {2, 19, 300}, {7, 33, 31}}) {
    const Product by_mx({blocks, mxfp4}, shape, kNumbers[0], random),
        by_blocks({blocks, blocks}, shape, kNumbers[0], random);
    memcpy(by_blocks.a.data.as(), by_mx.a.data.as(), by_mx.a.data.size());
    memcpy(by_blocks.a.scale.as(), by_mx.a.scale.as(), by_mx.a.scale.size());
    std::fill_n(by_blocks.b.scale.as<float>(), by_blocks.b.scale.size() / 4, 1.0f);
    for (int64_t i = 0; i < by_mx.b.scale.size(); ++i)  // E4M3 holds E2M1's numbers times 2^-8 to 2^6
      by_mx.b.scale.as()[i] = static_cast<uint8_t>(119 + random() % 15);
    const Buffer expected(shape.rows * shape.columns * 4), found(expected.size());
    const MatmulProblem p = by_mx.problem(found);
    for (int64_t n = 0; n < shape.columns; ++n)
      for (int64_t k = 0; k < shape.depth; ++k) {
        const float number = reference::decoded_code(p.b, shape.columns, 0, n, k) *
                             reference::decoded_scale(p.b, shape.columns, 0, n, k / mxfp4.block);
        by_blocks.b.data.as()[n * shape.depth + k] = static_cast<uint8_t>(float8_encode<E4M3>(number));
      }
    for (const Kernels* k : kernels_under_test()) {
      const check::Given isa(k->isa);
      run_chunks(*k, p, false), run_chunks(*k, by_blocks.problem(expected), false);
      CHECK_EQ(first_difference(found, expected, ElementType::kF32), -1);
    }
  }
}

TEST(matmul_of_float8_blocks_by_mxfp4_agrees_where_one_block_has_an_extreme_scale) {
  const Format blocks = format(CodeType::kE5M2, Scaling::kFloat32, false),
               mxfp4 = format(CodeType::kE2M1, Scaling::kE8M0, false);
  const Shape shape = {3, 40, 512};
  std::mt19937 random(14);
  for (const int byte : {0, 1, 26, 27, 120, 227, 228, 254, 255}) {
    const check::Given given("scale " + std::to_string(byte));
    const Product product({blocks, mxfp4}, shape, kNumbers[0], random);
    product.b.scale.as()[2 * (shape.depth / 32) + 5] = static_cast<uint8_t>(byte);  // of row 2
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

}  // namespace
}  // namespace jaxlowprec
