// Int4 kernels executed on the CPU: byte for byte the scalar reference, and each byte moved once where groups allow it.
#include <cuda_runtime.h>

#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/int4_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

std::string given_name(const Int4Matrices& m, ElementType type) {
  return name(m) + " of type " + std::to_string(static_cast<int>(type));
}

/// Elements `misalignment` elements into their memory.
void check_given(const Int4Matrices& m, ElementType type, const std::vector<uint8_t>& elements, int64_t misalignment = 0) {
  const check::Given given(given_name(m, type));
  const int64_t count = m.batch * m.size(), size = reference::element_size(type);
  const uint8_t* from = elements.data() + misalignment * size;
  const reference::Int4Codes expected = reference::quantize(m, from, type);
  const Array<uint8_t> x(elements, "x", Access::kReadOnly);
  const Array<uint8_t> data(expected.data.size(), "data"), zero(expected.zero.size(), "zero");
  const Array<uint16_t> scale(expected.scale.size(), "scale");
  const void* at = x.data() + misalignment * size;
  const Int4QuantizeProblem p{m, at, type, data.data(), scale.data(), m.format.symmetric ? nullptr : zero.data()};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(data.unwritten() + scale.unwritten() + zero.unwritten(), 0u);
  CHECK(data.values() == expected.data);
  CHECK(scale.values() == expected.scale);
  CHECK(zero.values() == expected.zero);
  if (!fake_quantize_serves(m, type)) return;
  const Array<uint8_t> result((count + misalignment) * size, "result");
  const Int4FakeQuantizeProblem fake{m, at, type, result.data() + misalignment * size};
  CHECK_EQ(cuda::launch(fake, nullptr), cudaSuccess);
  CHECK_EQ(result.unwritten(), static_cast<size_t>(misalignment * size));
  const std::vector<uint8_t> decoded = reference::dequantize(m, expected, type);
  CHECK(std::equal(decoded.begin(), decoded.end(), result.data() + misalignment * size));
}

void check_encoding(const Int4Matrices& m, ElementType type, uint32_t seed, int64_t misalignment = 0) {
  check_given(m, type, any_elements(type, m.batch * m.size() + misalignment, seed, seed % 2), misalignment);
}

void check_decoding(const Int4Matrices& m, ElementType type, uint32_t seed, int64_t misalignment = 0) {
  const check::Given given(given_name(m, type));
  const reference::Int4Codes codes = any_int4_codes(m, seed);
  const std::vector<uint8_t> expected = reference::dequantize(m, codes, type);
  const Array<uint8_t> data(codes.data, "data", Access::kReadOnly), zero(codes.zero, "zero", Access::kReadOnly);
  const Array<uint16_t> scale(codes.scale, "scale", Access::kReadOnly);
  const size_t skipped = misalignment * reference::element_size(type);
  const Array<uint8_t> result(expected.size() + skipped, "result");
  const Int4DequantizeProblem p{
      m, data.data(), scale.data(), m.format.symmetric ? nullptr : zero.data(), result.data() + skipped, type};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  CHECK_EQ(result.unwritten(), skipped);
  CHECK(std::equal(expected.begin(), expected.end(), result.data() + skipped));
}

TEST(codes_scales_and_decoded_values_are_the_references) {
  uint32_t seed = 0;
  for_int4_matrices([&](const Int4Matrices& m) {
    for (const ElementType type : kInt4Types) check_encoding(m, type, ++seed);
  });
}

TEST(any_codes_and_scales_decode_as_the_references) {
  uint32_t seed = 0;
  for_int4_matrices([&](const Int4Matrices& m) {
    for (const ElementType type : kInt4Types) check_decoding(m, type, ++seed);
  });
}

constexpr Int4Format kUsual = {128, true, ElementType::kBF16};

TEST(arrays_of_any_alignment_will_do) {
  for (const bool columnwise : {false, true}) {
    const Int4Matrices m{1, 128, 128, columnwise, kUsual};
    check_encoding(m, ElementType::kBF16, 5, 1);
    check_decoding(m, ElementType::kF32, 6, 1);
  }
}

TEST(the_order_of_threads_changes_nothing) {
  for (const bool columnwise : {false, true})
    cuda_on_cpu::in_every_order([&] {
      const Int4Matrices m{1, 128, 192, columnwise, {64, false, ElementType::kBF16}};
      check_encoding(m, ElementType::kBF16, 9);
      check_decoding(m, ElementType::kBF16, 9);
    });
}

TEST(each_byte_moves_once) {
  for (const bool columnwise : {false, true}) {
    const Int4Matrices m{1, 256, 256, columnwise, kUsual};
    const check::Given given(name(m));
    const uint64_t count = m.size(), groups = count / 128;
    const Array<uint8_t> x(any_elements(ElementType::kBF16, count, 3)), data(count / 2);
    const Array<uint16_t> scale(groups), result(count);
    CHECK_EQ(cuda::launch(Int4FakeQuantizeProblem{m, x.data(), ElementType::kBF16, result.data()}, nullptr), cudaSuccess);
    CHECK_EQ(x.traffic().read, 2 * count);
    CHECK_EQ(result.traffic().written, 2 * count);
    CHECK_EQ(result.traffic().read, 0u);
    cuda_on_cpu::reset_traffic();
    const Int4QuantizeProblem quantize{m, x.data(), ElementType::kBF16, data.data(), scale.data(), nullptr};
    CHECK_EQ(cuda::launch(quantize, nullptr), cudaSuccess);
    CHECK_EQ(x.traffic().read, 2 * count);
    CHECK_EQ(data.traffic().written, count / 2);
    CHECK_EQ(scale.traffic().written, 2 * groups);
    cuda_on_cpu::reset_traffic();
    const Int4DequantizeProblem dequantize{m, data.data(), scale.data(), nullptr, result.data(), ElementType::kBF16};
    CHECK_EQ(cuda::launch(dequantize, nullptr), cudaSuccess);
    CHECK_EQ(data.traffic().read, count / 2);
    CHECK_EQ(result.traffic().written, 2 * count);
  }
}

/// Quotients that are halves, of scales of 1 and of odd mantissas: 1/s is not exact, and on a GPU one unit off.
TEST(halves_round_to_even) {
  for (const int64_t group : {32, 64, 128})
    for (const ElementType deploy : {ElementType::kBF16, ElementType::kF16}) {
      const Int4Matrices m{1, 32, 512, false, {group, true, deploy}};
      std::vector<float> x(m.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const float steps = i % 32 == 0 ? 7.0f : static_cast<float>(i % 15) - 7.0f + 0.5f;
        x[i] = (steps > 7.0f ? 7.0f : steps) * (1.0f + static_cast<float>(i / 128) / 128.0f);
      }
      check_given(
          m, ElementType::kF32,
          std::vector<uint8_t>(reinterpret_cast<uint8_t*>(x.data()), reinterpret_cast<uint8_t*>(x.data() + x.size())));
    }
}

TEST(indices_pass_two_to_the_31) {
  constexpr int64_t kColumns = 4096, kRows = (int64_t{1} << 20) + 8, kEach = 16 * 2 * 256;  // elements of a piece
  const Int4Matrices all{1, kRows, kColumns, false, kUsual}, last{1, 2, kColumns, false, kUsual};
  const std::vector<uint8_t> elements = any_elements(ElementType::kBF16, 2 * kColumns, 4);
  const std::vector<uint8_t> expected =
      reference::dequantize(last, reference::quantize(last, elements.data(), ElementType::kBF16), ElementType::kBF16);
  const Array<uint8_t> x = Array<uint8_t>::zeros(all.size() * 2, "x"), result(all.size() * 2, "result");
  const int64_t first = (all.size() - last.size()) * 2;
  std::memcpy(&x[first], elements.data(), elements.size());
  const cuda_on_cpu::Device before = cuda_on_cpu::device();
  cuda_on_cpu::device().multiprocessors = 1 << 20, cuda_on_cpu::device().index = 1;  // a block for each piece
  cuda_on_cpu::options().only_blocks = {dim3(static_cast<unsigned>(all.size() / kEach - 1), 0, 0)};
  CHECK_EQ(cuda::launch(Int4FakeQuantizeProblem{all, x.data(), ElementType::kBF16, result.data()}, nullptr), cudaSuccess);
  cuda_on_cpu::options().only_blocks = {}, cuda_on_cpu::device() = before;
  CHECK(std::equal(expected.begin(), expected.end(), &result[first]));
}

TEST(what_no_kernel_serves_is_refused) {
  const Int4Matrices m{1, 4, 128, false, kUsual};
  Int4Matrices single = m;
  single.format.scale = ElementType::kF32;
  CHECK_EQ(cuda::launch(Int4FakeQuantizeProblem{m, nullptr, ElementType::kF16, nullptr}, nullptr), cudaErrorInvalidValue);
  CHECK_EQ(cuda::launch(Int4FakeQuantizeProblem{single, nullptr, ElementType::kF32, nullptr}, nullptr),
           cudaErrorInvalidValue);
  uint8_t zero;
  CHECK_EQ(cuda::launch(Int4QuantizeProblem{m, nullptr, ElementType::kF32, nullptr, nullptr, &zero}, nullptr),
           cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
