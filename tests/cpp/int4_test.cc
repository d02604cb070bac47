// The CPU's Int4 kernels of every instruction set against the scalar reference, byte for byte.
#include "int4_reference.h"
#include "kernel_runs.h"

namespace jaxlowprec {
namespace {

template <class T>
Buffer copy_of(const std::vector<T>& values) {
  Buffer buffer(values.size() * sizeof(T));
  if (!values.empty()) memcpy(buffer.as(), values.data(), buffer.size());
  return buffer;
}

template <class T>
bool same(const Buffer& found, const std::vector<T>& expected) {
  return found.size() == static_cast<int64_t>(expected.size() * sizeof(T)) &&
         (expected.empty() || memcmp(found.as(), expected.data(), found.size()) == 0);
}

TEST(codes_scales_and_decoded_values_are_the_references) {
  std::mt19937 random(1);
  for_int4_matrices([&](const Int4Matrices& m) {
    for (const ElementType type : kInt4Types) {
      const Data data = static_cast<Data>(random() % 6);
      const int64_t count = m.batch * m.size(), misalignment = random() % 2 * 4;
      const check::Given given(name(m) + " of type " + std::to_string(static_cast<int>(type)) + ", data " +
                               std::to_string(static_cast<int>(data)));
      const Buffer x(count * reference::element_size(type), misalignment);
      fill_elements(x.as(), type, 0, count, data, random);
      const reference::Int4Codes expected = reference::quantize(m, x.as(), type);
      const std::vector<uint8_t> decoded = reference::dequantize(m, expected, type);
      for_all_runs([&](const Kernels& k, bool scrambled) {
        const Buffer codes(expected.data.size(), misalignment), scale(expected.scale.size() * 2), zero(expected.zero.size());
        run_chunks(
            k,
            Int4QuantizeProblem{m, x.as(), type, codes.as(), scale.as<uint16_t>(), m.format.symmetric ? nullptr : zero.as()},
            scrambled);
        CHECK(same(codes, expected.data) && same(scale, expected.scale) && same(zero, expected.zero));
        if (!fake_quantize_serves(m, type)) return;
        const Buffer result(x.size(), misalignment);
        run_chunks(k, Int4FakeQuantizeProblem{m, x.as(), type, result.as()}, scrambled);
        CHECK(same(result, decoded));
      });
    }
  });
}

TEST(any_codes_and_scales_decode_as_the_references) {
  uint32_t seed = 0;
  for_int4_matrices([&](const Int4Matrices& m) {
    const check::Given given(name(m));
    const reference::Int4Codes codes = any_int4_codes(m, ++seed);
    const Buffer data = copy_of(codes.data), scale = copy_of(codes.scale), zero = copy_of(codes.zero);
    for (const ElementType type : kInt4Types) {
      const std::vector<uint8_t> expected = reference::dequantize(m, codes, type);
      for_all_runs([&](const Kernels& k, bool scrambled) {
        const Buffer result(expected.size());
        run_chunks(k,
                   Int4DequantizeProblem{m, data.as(), scale.as<uint16_t>(), m.format.symmetric ? nullptr : zero.as(),
                                         result.as(), type},
                   scrambled);
        CHECK(same(result, expected));
      });
    }
  });
}

/// Every magnitude of a 16-bit dtype as the group's largest, and all of its elements at the middle of two steps.
TEST(ties_of_every_scale_go_to_the_even_step) {
  for (const ElementType deploy : {ElementType::kBF16, ElementType::kF16}) {
    const uint32_t infinity = deploy == ElementType::kF16 ? 0x7C00 : 0x7F80, stride = kReduced ? 37 : 1;
    constexpr int64_t kGroup = 32;
    std::vector<uint16_t> x;
    for (uint32_t bits = 0; bits < infinity; bits += stride) {
      const float amax = reference::number(bits, deploy);
      const float scale = reference::deployed(std::max(amax / 7.0f, 1e-5f), deploy);
      for (int i = 0; i < kGroup; ++i) {
        const float tie = (static_cast<float>(i / 4) + 0.5f) * scale * (i % 2 ? -1.0f : 1.0f);
        const auto near = reference::rounded_bits(i == 0 ? amax : std::abs(tie) < amax ? tie : 0.0f, deploy);
        x.push_back(static_cast<uint16_t>(near));
      }
    }
    for (const bool symmetric : {true, false}) {
      const Int4Matrices m{1, static_cast<int64_t>(x.size()) / kGroup, kGroup, false, {kGroup, symmetric, deploy}};
      const check::Given given(name(m));
      const reference::Int4Codes expected = reference::quantize(m, x.data(), deploy);
      for_all_runs([&](const Kernels& k, bool scrambled) {
        const Buffer codes(expected.data.size()), scale(expected.scale.size() * 2), zero(expected.zero.size());
        run_chunks(
            k, Int4QuantizeProblem{m, x.data(), deploy, codes.as(), scale.as<uint16_t>(), symmetric ? nullptr : zero.as()},
            scrambled);
        CHECK(same(codes, expected.data) && same(scale, expected.scale) && same(zero, expected.zero));
      });
    }
  }
}

}  // namespace
}  // namespace jaxlowprec
