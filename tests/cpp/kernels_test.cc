// The CPU kernels of every instruction set against their references, byte for byte, over ragged shapes and hostile numbers.
// All are held to the same bytes, so instruction sets agree with each other.
#include "kernel_runs.h"
#include "quantize_cases.h"

namespace jaxlowprec {
namespace {

/// Read before any test switches instruction sets.
const std::string isa_at_start = kernels().isa;

/// Empty or partial blocks, packets, slabs, spans and chunks on either side.
std::vector<Shape> shapes() {
  return {{1, 1},    {1, 16},   {16, 1},  {17, 33},  {3, 50},    {5, 256},   {40, 300},
          {128, 64}, {260, 20}, {256, 9}, {1, 4100}, {130, 258}, {144, 256}, {9, 4096}};
}

/// Large shapes would only repeat what small ones show about numbers.
bool is_large(Shape shape) { return shape.rows * shape.columns > 4200; }

// --- amax (numerics.md 1 and 3)

void check_amax(Shape shape, ElementType type, Data data, bool plain, bool rotated, std::mt19937& random) {
  constexpr int64_t batch = 2;
  const int64_t size = shape.rows * shape.columns;
  const Buffer x(batch * size * reference::element_size(type), random() % 2 * 4);
  fill_elements(x.as(), type, 0, size, data, random);
  fill_elements(x.as(), type, size, size, Data::kNormal, random);  // batch entries are independent
  AmaxProblem p{x.as(), type, batch, shape.rows, shape.columns, nullptr, nullptr, kDefaultSignMask};
  uint32_t expected[batch], expected_rotated[batch];
  for (int64_t b = 0; b < batch; ++b) {
    if (plain) expected[b] = reference::amax_bits(reference::lines_of(p, b, false, false));
    if (rotated) expected_rotated[b] = reference::amax_bits(reference::lines_of(p, b, true, true));
  }
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer found(batch * 4), found_rotated(batch * 4);
    memset(found.as(), 0, found.size()), memset(found_rotated.as(), 0, found_rotated.size());
    p.plain = plain ? found.as<uint32_t>() : nullptr;
    p.rotated = rotated ? found_rotated.as<uint32_t>() : nullptr;
    run_chunks(k, p, scrambled);
    for (int64_t b = 0; b < batch; ++b) {
      if (plain) CHECK_EQ(p.plain[b], expected[b]);
      if (rotated) CHECK_EQ(p.rotated[b], expected_rotated[b]);
    }
  });
}

TEST(amax_and_rotated_amax_agree_with_the_reference) {
  std::mt19937 random(1);
  for (const Shape shape : shapes())
    for (const ElementType type : kTypes)
      for (const Data data : {Data::kNormal, Data::kSparse, Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity}) {
        if (is_large(shape) && random() % 3) continue;
        const check::Given given(name(shape) + " " + name(type) + " data " + std::to_string(static_cast<int>(data)));
        check_amax(shape, type, data, true, false, random);
        check_amax(shape, type, data, random() % 2, true, random);
      }
}

TEST(rotated_amax_sees_sums_that_overflow) {
  for (const ElementType type : kTypes) {
    const Buffer x(16 * reference::element_size(type));
    const float large = type == ElementType::kF16 ? 60000.0f : 3e38f;
    for (int64_t i = 0; i < 16; ++i) reference::put(x.as(), type, i, (kDefaultSignMask >> i) & 1 ? -large : large);
    uint32_t rotated = 0;
    const AmaxProblem p{x.as(), type, 1, 16, 1, nullptr, &rotated, kDefaultSignMask};
    const check::Given given(name(type));
    for_all_runs([&](const Kernels& k, bool scrambled) {
      rotated = 0;
      run_chunks(k, p, scrambled);
      CHECK(rotated >= kInfinityBits);
      CHECK_EQ(rotated, reference::amax_bits(reference::lines_of(p, 0, true, true)));
    });
  }
}

// --- quantisation (numerics.md 2 to 7)

/// Both matrices of x.
void check_quantize(const Buffer& x, int64_t misalignment, Shape shape, ElementType type, const NamedFormat& format,
                    const Mode& mode, bool stochastic, const Numbers* const (&numbers)[2], std::mt19937& random) {
  QuantizeCase c(x, shape, type, format, mode, stochastic, numbers, random);
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer row_data(c.rowwise.data.size(), misalignment), row_scale(c.rowwise.scale.size(), misalignment);
    const Buffer column_data(c.columnwise.data.size(), misalignment), column_scale(c.columnwise.scale.size(), misalignment);
    QuantizeProblem& p = c.problem;
    if (mode.rowwise) p.rowwise.data = row_data.as(), p.rowwise.scale = row_scale.as();
    if (mode.columnwise) p.columnwise.data = column_data.as(), p.columnwise.scale = column_scale.as();
    run_chunks(k, p, scrambled);
    c.rowwise.check(row_data, row_scale), c.columnwise.check(column_data, column_scale);
  });
}

/// Every format, shape, type and mode with some of the numbers: in turn, so that each meets all of them.
template <size_t N>
void quantize_agrees_with_the_reference(const NamedFormat (&formats)[N], size_t small, size_t large, bool stochastic) {
  std::mt19937 random(stochastic);
  const size_t count = std::size(kNumbers);
  size_t turn = 0;
  for (const NamedFormat& format : formats)
    for (const Shape shape : shapes())
      for (const ElementType type : kTypes)
        for (const Mode& mode : kModes) {
          if (mode.rotate && (format.format.scaling != Scaling::kTwoLevel || format.format.tiles)) continue;
          for (size_t i = 0; i < (is_large(shape) ? large : small); ++i, ++turn) {
            if (kReduced && turn % 2) continue;
            const Numbers* const numbers[2] = {&kNumbers[turn % count], &kNumbers[(turn * 5 + 3) % count]};
            const check::Given given(name(shape) + " " + name(type) + ", " + format.name + " " + mode.name + ", " +
                                     numbers[0]->name + "; " + numbers[1]->name);
            const int64_t size = shape.rows * shape.columns, misalignment = random() % 2 * 4;
            const Buffer x(2 * size * reference::element_size(type), misalignment);
            for (int64_t b = 0; b < 2; ++b) fill_elements(x.as(), type, b * size, size, numbers[b]->data, random);
            check_quantize(x, misalignment, shape, type, format, mode, stochastic, numbers, random);
          }
        }
}

/// Under the largest element of a block of 32, the least or the greatest of a binade: every mantissa of both signs in that
/// binade and in those below, past the least code, and some zeros.
TEST(quantize_agrees_with_the_reference_over_all_bf16_near_the_codes) {
  constexpr Shape kShape = {70, 128};
  std::mt19937 random(7);
  for (const NamedFormat& format : kOtherFormats)
    for (const int exponent : {-90, 0, 90}) {
      const Buffer x(2 * kShape.rows * kShape.columns * 2);
      uint32_t pattern = 0;
      for (int64_t i = 0; i < x.size() / 2; ++i) {
        const uint32_t top = static_cast<uint32_t>(127 + exponent) << 7 | (2 * i < x.size() / 2 ? 0u : 127u);
        const uint32_t below = pattern / 256, bits = pattern % 256 < 128 ? pattern % 128 : 0x8000u | pattern % 128;
        if (i % 32 != 0) pattern = (pattern + 1) % (34 * 256);
        const uint32_t element = i % 32 == 0   ? top
                                 : below == 33 ? bits & 0x8000u
                                               : bits | static_cast<uint32_t>(127 + exponent - below) << 7;
        x.as<uint16_t>()[i] = static_cast<uint16_t>(element);
      }
      for (const Mode& mode : kModes) {
        if (mode.rotate) continue;
        const check::Given given(std::string(format.name) + " " + mode.name + ", 2^" + std::to_string(exponent));
        check_quantize(x, 0, kShape, ElementType::kBF16, format, mode, false, {&kNumbers[0], &kNumbers[0]}, random);
      }
    }
}

TEST(quantize_nvfp4_to_nearest_agrees_with_the_reference) { quantize_agrees_with_the_reference(kNvfp4, 12, 2, false); }
TEST(quantize_by_chosen_scales_agrees_with_the_reference) {
  quantize_agrees_with_the_reference(kChosenScales, 12, 1, false);
}
TEST(quantize_nvfp4_stochastically_agrees_with_the_reference) { quantize_agrees_with_the_reference(kNvfp4, 12, 2, true); }
TEST(quantize_by_eden_agrees_with_the_reference) { quantize_agrees_with_the_reference(kEden, 12, 2, true); }
TEST(quantize_to_nearest_agrees_with_the_reference) { quantize_agrees_with_the_reference(kOtherFormats, 5, 1, false); }
TEST(quantize_stochastically_agrees_with_the_reference) { quantize_agrees_with_the_reference(kOtherFormats, 5, 1, true); }
TEST(quantize_lines_agrees_with_the_reference) {
  for (const bool stochastic : {false, true}) quantize_agrees_with_the_reference(kLineFormats, 5, 1, stochastic);
}
TEST(quantize_of_every_element_block_and_rule_agrees_with_the_reference) {
  for (const bool stochastic : {false, true}) quantize_agrees_with_the_reference(kFurtherFormats, 1, 0, stochastic);
}

TEST(row_scaled_quantize_agrees_with_the_reference) {
  std::mt19937 random(5);
  for (const NamedFormat& format : kRowScaled)
    for (const Shape shape : shapes())
      for (const ElementType type : kTypes) {
        const check::Given given(name(shape) + " " + name(type) + ", " + format.name);
        const int64_t misalignment = random() % 2 * 4;
        RowScaledCase c(shape, type, format.format, misalignment, random);
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Buffer amax(c.rows.tensor.size());
          const Buffer data(c.rows.data.size(), misalignment), scale(c.rows.scale.size(), misalignment);
          c.problem.amax = amax.as<float>(), c.problem.data = data.as(), c.problem.scale = scale.as();
          run_chunks(k, c.problem, scrambled);
          CHECK_EQ(first_difference(amax, c.rows.tensor), -1);
          c.rows.check(data, scale);
        });
      }
}

// --- decoding (numerics.md 2 and 5 to 7)

void check_dequantize(Shape shape, ElementType type, const NamedFormat& format, bool rotate, float amax,
                      std::mt19937& random) {
  const Format& f = format.format;
  const int64_t batch = 2, misalignment = random() % 2 * 4;
  const Buffer data(batch * shape.rows * f.row_bytes(shape.columns), misalignment);
  const Buffer scale(batch * f.scales(shape.rows, shape.columns) * f.scale_bytes(), misalignment);
  for (int64_t i = 0; i < data.size(); ++i) data.as()[i] = static_cast<uint8_t>(random());    // NaN among them
  for (int64_t i = 0; i < scale.size(); ++i) scale.as()[i] = static_cast<uint8_t>(random());  // any number
  const float amaxes[2] = {amax, 0.7f};
  DequantizeProblem p{f,
                      data.as(),
                      scale.as(),
                      f.scaling == Scaling::kTwoLevel ? amaxes : nullptr,
                      batch,
                      shape.rows,
                      shape.columns,
                      rotate,
                      kDefaultSignMask,
                      nullptr,
                      type};
  const int64_t bytes = batch * shape.rows * shape.columns * reference::element_size(type);
  const Buffer expected(bytes);
  reference::dequantize(p, expected.as());
  for_all_runs([&](const Kernels& k, bool scrambled) {
    const Buffer found(bytes, misalignment);
    p.result = found.as();
    run_chunks(k, p, scrambled);
    CHECK_EQ(first_difference(found, expected, type), -1);
  });
}

TEST(dequantize_nvfp4_agrees_with_the_reference) {
  std::mt19937 random(3);
  for (const Shape shape : shapes())
    for (const ElementType type : kTypes)
      for (const NamedFormat& format : kNvfp4)
        for (const bool rotate : {false, true})
          for (const float amax : {3.0f, 0.0f, 1e-39f, 1e-36f, 1e36f, std::numeric_limits<float>::infinity()}) {
            if (is_large(shape) && random() % 4) continue;
            const check::Given given(name(shape) + " " + name(type) + " " + format.name + (rotate ? " rotated" : "") +
                                     " amax " + std::to_string(amax));
            check_dequantize(shape, type, format, rotate, amax, random);
          }
}

TEST(dequantize_agrees_with_the_reference) {
  std::mt19937 random(6);
  for (const Shape shape : shapes())
    for (const ElementType type : kTypes)
      for (const NamedFormat& format : kOtherFormats) {
        const check::Given given(name(shape) + " " + name(type) + " " + format.name);
        check_dequantize(shape, type, format, false, 0, random);
      }
}

// --- Hadamard transforms (numerics.md 3)

TEST(hadamard_agrees_with_the_reference) {
  std::mt19937 random(4);
  const Shape counts[] = {{1, 1}, {5, 3}, {3, 1}, {17, 2}, {70, 1}, {300, 3}, {128, 17}};  // lines, transforms along each
  for (const ElementType type : kTypes)
    for (const int size : {16, 32, 64, 128, 256})
      for (const bool vertical : {false, true})
        for (const bool inverse : {false, true})
          for (const Shape count : counts) {
            if (count.rows * count.columns * size > 50000) continue;
            const bool drawn = size <= kDrawnSigns && random() % 2;
            const Data data = static_cast<Data>(random() % 6);
            const int64_t length = count.columns * size, lines = count.rows, batch = 2, misalignment = random() % 2 * 4;
            const int64_t elements = batch * lines * length, bytes = elements * reference::element_size(type);
            const check::Given given(name(type) + " size " + std::to_string(size) + (vertical ? " vertical" : "") +
                                     (inverse ? " inverse " : " ") + (drawn ? "drawn " : "") + name(count));
            const Buffer x(bytes, misalignment), signs(size * 4), words(batch * 16), expected(bytes);
            fill_elements(x.as(), type, 0, elements, data, random);
            for (int i = 0; i < size; ++i) signs.as<uint32_t>()[i] = random() % 2 ? kSignBit : 0;
            for (int i = 0; i < 4 * batch; ++i) words.as<uint32_t>()[i] = random();
            HadamardProblem p{x.as(), type,     batch,   vertical ? length : lines, vertical ? lines : length,
                              size,   vertical, inverse, signs.as<uint32_t>(),      nullptr};
            if (drawn) p.drawn_signs = words.as<uint32_t>();
            reference::hadamard(p, expected.as());
            for_all_runs([&](const Kernels& k, bool scrambled) {
              const Buffer found(bytes, misalignment);
              p.result = found.as();
              run_chunks(k, p, scrambled);
              CHECK_EQ(first_difference(found, expected, type), -1);
            });
          }
}

// --- around the kernels

TEST(kernels_leave_the_callers_subnormals_alone) {
  const float x = 1;
  uint32_t most = 0;
  const AmaxProblem p{&x, ElementType::kF32, 1, 1, 1, &most, nullptr, 0};
  for_all_runs([&](const Kernels& k, bool scrambled) {
    run_chunks(k, p, scrambled);
    volatile float smallest = std::numeric_limits<float>::min();
    CHECK(smallest / 2 > 0);
  });
}

#if !defined(JLP_TEST_EMULATED_AVX512)

TEST(dispatch_offers_the_portable_kernels_everywhere) {
  const std::vector<std::string> isas = available_isas();
  CHECK_EQ(isas.back(), "portable");
  for (const std::string& isa : isas) {
    CHECK(use_isa(isa));
    CHECK_EQ(kernels().isa, isa);
  }
  CHECK(!use_isa("no such set"));
  CHECK_EQ(kernels().isa, isas.back());
}

TEST(dispatch_starts_with_the_set_the_environment_names_or_the_best) {
  const char* wanted = std::getenv("JAXLOWPREC_ISA");
  const std::vector<std::string> isas = available_isas();
  const bool known = wanted && std::find(isas.begin(), isas.end(), wanted) != isas.end();
  CHECK_EQ(isa_at_start, known ? wanted : isas.front());
}

#endif

}  // namespace
}  // namespace jaxlowprec
