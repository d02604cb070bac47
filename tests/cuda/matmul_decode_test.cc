// Kernels: dequantize.cu
// The GEMM of few rows by a 4-bit weight: within numerics.md 9's bound of the float64 product of the decoded operands, the
// same bytes in every order of threads and whatever other rows there are, the weight read once.
#include "../../xla_ffi/cuda/weight_only/matmul_decode.h"

#include <cuda_runtime.h>

#include <memory>

#include "../cpp/check.h"
#include "../cpp/matmul_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda::WeightType;
using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

struct Case {
  WeightType weight;
  int64_t rows, columns, depth;
  int32_t group = 16;
  bool tiles = false, zero_points = false, x_codes = false, poison = false;
  ElementType type = ElementType::kF32;
};

std::string describe(const Case& c) {
  return std::string(c.weight == WeightType::kNvfp4 ? "NVFP4 " : "INT4 ") + std::to_string(c.rows) + "x" +
         std::to_string(c.columns) + "x" + std::to_string(c.depth) + ", groups of " + std::to_string(c.group) +
         (c.tiles ? ", tiles" : "") + (c.zero_points ? ", zero points" : "") + (c.x_codes ? ", x in codes" : "");
}

/// Operands as bytes and as the numbers they stand for.
struct Operands {
  std::vector<uint8_t> x, x_scale, w, w_scale, zero_point;
  std::vector<double> a, b;  // [rows, depth], [columns, depth]
  int64_t groups;

  Operands(const Case& c, uint32_t seed) : groups((c.depth + c.group - 1) / c.group) {
    make_x(c, seed);
    w = any_bytes(c.columns * groups * c.group / 2, seed + 2);
    if (c.weight == WeightType::kNvfp4)
      make_nvfp4(c, seed);
    else
      make_int4(c, seed);
  }

 private:
  static std::vector<uint8_t> e4m3_scales(int64_t count, bool poison, uint32_t seed) {
    std::vector<uint8_t> scales = any_bytes(count, seed);
    for (uint8_t& scale : scales)
      if (!poison && (scale & 0x7F) == kFloat8NaN) scale = 0x7E;
    return scales;
  }

  void make_x(const Case& c, uint32_t seed) {
    a.resize(c.rows * c.depth);
    const Format format = nvfp4(false);
    if (c.x_codes) {
      x = any_bytes(c.rows * format.row_bytes(c.depth), seed);
      x_scale = e4m3_scales(format.scales(c.rows, c.depth), c.poison, seed + 1);
    } else {
      std::mt19937 random(seed);
      std::normal_distribution<float> normal;
      x.resize(c.rows * c.depth * 2);
      for (int64_t i = 0; i < c.rows * c.depth; ++i) reference::put(x.data(), ElementType::kBF16, i, normal(random));
    }
    const MatmulOperand operand{format, x.data(), x_scale.data(), nullptr, c.depth};
    for (int64_t m = 0; m < c.rows; ++m)
      for (int64_t k = 0; k < c.depth; ++k)
        a[m * c.depth + k] = c.x_codes ? double{reference::decoded_code(operand, c.rows, 0, m, k)} *
                                             reference::decoded_scale(operand, c.rows, 0, m, k / 16)
                                       : double{reference::get(x.data(), ElementType::kBF16, m * c.depth + k)};
  }

  void make_nvfp4(const Case& c, uint32_t seed) {
    const Format format = nvfp4(c.tiles);
    w_scale = e4m3_scales(format.scales(c.columns, c.depth), c.poison, seed + 3);
    const MatmulOperand operand{format, w.data(), w_scale.data(), nullptr, c.depth};
    for (int64_t n = 0; n < c.columns; ++n)
      for (int64_t k = 0; k < c.depth; ++k)
        b.push_back(double{reference::decoded_code(operand, c.columns, 0, n, k)} *
                    reference::decoded_scale(operand, c.columns, 0, n, k / 16));
  }

  void make_int4(const Case& c, uint32_t seed) {
    std::mt19937 random(seed + 3);
    for (int64_t i = 0; i < c.columns * groups; ++i) {
      const float several[] = {1e-5f, 0.02f, 1.0f, 300.0f, 0.0f, c.poison ? NAN : 2.0f};
      w_scale.resize(w_scale.size() + 2);
      reference::put(w_scale.data(), ElementType::kBF16, i, several[random() % 6] * (1 + random() % 100 / 100.0f));
      zero_point.push_back(static_cast<uint8_t>(c.zero_points ? random() % 16 : 8));
    }
    for (int64_t n = 0; n < c.columns; ++n)
      for (int64_t k = 0; k < c.depth; ++k) {
        const int64_t group = n * groups + k / c.group;
        const int code = static_cast<int>(reference::code_at(&w[n * groups * c.group / 2], k)) - zero_point[group];
        const float weight = code * reference::get(w_scale.data(), ElementType::kBF16, group);
        b.push_back(reference::number(reference::rounded_bits(weight, ElementType::kBF16), ElementType::kBF16));
      }
  }
};

/// The operands on the device, and what a launch leaves.
struct Device {
  Array<uint8_t> x, x_scale, w, w_scale, zero_point;
  Array<float> alpha;
  std::unique_ptr<Array<uint8_t>> workspace, result;

  Device(const Operands& o, float alpha)
      : x(o.x, "x", Access::kReadOnly),
        x_scale(o.x_scale, "x scale", Access::kReadOnly),
        w(o.w, "w", Access::kReadOnly),
        w_scale(o.w_scale, "w scale", Access::kReadOnly),
        zero_point(o.zero_point, "zero point", Access::kReadOnly),
        alpha(std::vector<float>{alpha}, "alpha", Access::kReadOnly) {}

  std::vector<uint8_t> run(const Case& c, bool with_alpha = true, bool all_blocks = true) {
    cuda::MatmulDecodeProblem p{};
    if (c.x_codes)
      p.x = {nvfp4(false), x.data(), x_scale.data(), nullptr, c.depth};
    else
      p.x_bf16 = x.data();
    p.w = {c.weight, w.data(), w_scale.data(), c.zero_points ? zero_point.data() : nullptr, c.group, c.tiles};
    p.alpha = with_alpha ? alpha.data() : nullptr;
    p.rows = c.rows, p.columns = c.columns, p.depth = c.depth, p.type = c.type;
    workspace = std::make_unique<Array<uint8_t>>(cuda::matmul_decode_workspace_bytes(p), "workspace");
    result = std::make_unique<Array<uint8_t>>(c.rows * c.columns * reference::element_size(c.type), "result");
    p.workspace = workspace->data(), p.result = result->data();
    CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
    CHECK_EQ(result->unwritten() == 0, all_blocks);
    return result->values();
  }
};

/// numerics.md 9's bound on columns `first` ... of float32 results, of which each row has `stride`.
void check_bound(const Case& c, const Operands& o, float alpha, const std::vector<uint8_t>& result, int64_t first,
                 int64_t stride) {
  for (int64_t m = 0; m < c.rows; ++m)
    for (int64_t n = 0; n < c.columns; ++n) {
      double exact = 0, magnitudes = 0;
      for (int64_t k = 0; k < c.depth; ++k) {
        const double product = o.a[m * c.depth + k] * o.b[n * c.depth + k];
        exact += product, magnitudes += std::fabs(product);
      }
      const double y = reference::get(result.data(), ElementType::kF32, m * stride + first + n);
      if (std::isnan(exact))
        CHECK(std::isnan(y));
      else  // with alpha there is one rounding more
        CHECK(std::fabs(y - alpha * exact) <= (c.depth + (alpha != 1.0f)) * 0x1p-24 * alpha * magnitudes);
    }
}

void check_case(const Case& c, uint32_t seed) {
  const check::Given given(describe(c));
  const Operands o(c, seed);
  const float alpha = seed % 2 ? 1.0f : 0.37f;
  Case wide = c;
  wide.type = ElementType::kF32;
  const std::vector<uint8_t> result = Device(o, alpha).run(wide, seed % 2 == 0);
  check_bound(c, o, alpha, result, 0, c.columns);
  if (c.type == ElementType::kF32) return;
  const std::vector<uint8_t> narrow = Device(o, alpha).run(c, seed % 2 == 0);
  for (int64_t i = 0; i < c.rows * c.columns; ++i)
    CHECK_EQ(reference::get_bits(narrow.data(), c.type, i),
             reference::rounded_bits(reference::get(result.data(), ElementType::kF32, i), c.type));
}

Case nvfp4_case(int64_t rows, int64_t columns, int64_t depth) { return {WeightType::kNvfp4, rows, columns, depth}; }
Case int4_case(int64_t rows, int64_t columns, int64_t depth, int32_t group) {
  return {WeightType::kInt4, rows, columns, depth, group};
}

TEST(every_number_of_rows_is_within_the_bound) {
  uint32_t seed = 0;
  for (int64_t rows = 1; rows <= 16; ++rows) {
    check_case(nvfp4_case(rows, 40, 320), ++seed);
    check_case(int4_case(rows, 40, 320, 32), ++seed);
  }
  for (const int64_t rows : {17, 33, 64}) check_case(nvfp4_case(rows, 16, 160), ++seed);
}

TEST(any_shape_is_within_the_bound) {
  uint32_t seed = 100;
  for (const int64_t rows : {1, 3, 12})
    for (const int64_t columns : {1, 17, 32, 100})
      for (const int64_t depth : {1, 15, 16, 32, 48, 130, 200, 1032}) {
        Case c = nvfp4_case(rows, columns, depth);
        check_case(c, ++seed);
        c.tiles = true;
        check_case(c, ++seed);
        check_case(int4_case(rows, columns, depth, 32), ++seed);
      }
}

TEST(int4_groups_and_zero_points) {
  uint32_t seed = 1000;
  for (const int32_t group : {32, 64, 96, 128, 1024})
    for (const bool zero_points : {false, true})
      for (const int64_t depth : {96, 1024, 1152}) {
        Case c = int4_case(5, 35, depth, group);
        c.zero_points = zero_points;
        check_case(c, ++seed);
      }
}

TEST(x_may_be_nvfp4_codes) {
  uint32_t seed = 2000;
  for (const int64_t rows : {1, 8, 16})
    for (const int64_t depth : {16, 128, 272, 301}) {
      Case c = nvfp4_case(rows, 33, depth);
      c.x_codes = true;
      check_case(c, ++seed);
    }
}

TEST(blocks_share_a_long_contraction) {
  uint32_t seed = 3000;
  for (const int64_t rows : {1, 9}) {
    check_case(nvfp4_case(rows, 16, 4096), ++seed);
    check_case(int4_case(rows, 33, 6272, 128), ++seed);
    Case c = nvfp4_case(rows, 16, 2100);
    c.x_codes = true;
    check_case(c, ++seed);
  }
}

TEST(a_warp_goes_through_many_pieces_of_the_contraction) {
  constexpr int64_t kCopies = 140;  // so many weight rows that blocks need not share the contraction
  for (Case c : {nvfp4_case(3, 128, 4240), int4_case(16, 128, 3232, 32)}) {
    const check::Given given(describe(c));
    Operands o(c, 8);
    for (std::vector<uint8_t>* array : {&o.w, &o.w_scale, &o.zero_point}) {
      const std::vector<uint8_t> once = *array;
      for (int64_t i = 1; i < kCopies; ++i) array->insert(array->end(), once.begin(), once.end());
    }
    Case wide = c;
    wide.columns *= kCopies;
    cuda_on_cpu::options().only_blocks = {dim3(0, 0, 0), dim3(kCopies - 1, 0, 0)};
    const std::vector<uint8_t> result = Device(o, 1.0f).run(wide, true, false);
    cuda_on_cpu::options().only_blocks = {};
    for (const int64_t block : {int64_t{0}, kCopies - 1}) check_bound(c, o, 1.0f, result, block * c.columns, wide.columns);
  }
}

TEST(poison_stays) {
  uint32_t seed = 4000;
  for (const bool tiles : {false, true}) {
    Case c = nvfp4_case(4, 64, 256);
    c.poison = true, c.tiles = tiles;
    check_case(c, ++seed);
  }
  Case c = int4_case(4, 64, 256, 64);
  c.poison = true;
  check_case(c, ++seed);
}

TEST(results_of_16_bits_are_rounded_once) {
  for (const ElementType type : {ElementType::kBF16, ElementType::kF16})
    for (const int64_t depth : {256, 4096}) {
      Case c = int4_case(3, 33, depth, 64);
      c.type = type;
      check_case(c, 4);
    }
}

TEST(the_order_of_threads_changes_no_byte) {
  for (const Case& c : {nvfp4_case(5, 40, 2200), int4_case(16, 70, 4096, 128)}) {
    const check::Given given(describe(c));
    const Operands o(c, 5);
    const std::vector<uint8_t> first = Device(o, 0.5f).run(c);
    cuda_on_cpu::in_every_order([&] { CHECK(Device(o, 0.5f).run(c) == first); });
  }
}

TEST(a_row_depends_on_no_other_nor_on_how_many_there_are) {
  for (const int64_t depth : {384, 4096}) {
    const Case all = nvfp4_case(20, 40, depth);
    const Operands o(all, 6);
    const std::vector<uint8_t> together = Device(o, 1.0f).run(all);
    for (const int64_t row : {0, 7, 11, 19}) {
      Operands one = o;
      one.x.assign(o.x.begin() + row * depth * 2, o.x.begin() + (row + 1) * depth * 2);
      const std::vector<uint8_t> alone = Device(one, 1.0f).run(nvfp4_case(1, 40, depth));
      CHECK(std::equal(alone.begin(), alone.end(), together.begin() + row * 40 * 4));
    }
  }
}

/// The streaming kernel, which writes no workspace, as far as that is known of a device: by its shared memory.
TEST(weights_of_whole_units_take_one_launch) {
  uint32_t seed = 5000;
  const auto check = [&](Case c) {
    const check::Given given(describe(c));
    const Operands o(c, ++seed);
    const float alpha = seed % 2 ? 1.0f : 0.37f;
    std::vector<uint8_t> first;
    cuda_on_cpu::in_every_order([&] {
      Device device(o, alpha);
      const std::vector<uint8_t> result = device.run(c, seed % 2 == 0);
      CHECK_EQ(device.workspace->traffic().written, 0u);
      CHECK_EQ(device.w.traffic().read, (c.rows + 15) / 16 * o.w.size());
      if (first.empty()) first = result, check_bound(c, o, alpha, result, 0, c.columns);
      CHECK(result == first);
    });
  };
  for (const int64_t rows : {1, 8, 9, 16, 17}) {
    check(int4_case(rows, 16, 2048, 128));
    check(nvfp4_case(rows, 48, 2176));
  }
  for (const int32_t group : {32, 64, 256})
    for (const bool zero_points : {false, true}) {
      Case c = int4_case(3, 32, 768, group);
      c.zero_points = zero_points;
      check(c);
    }
  Case tiles = nvfp4_case(5, 80, 640);
  tiles.tiles = true;
  check(tiles);
  check(int4_case(2, 16, 128 * 17, 32));  // rows of scales that are not whole pieces
  for (const int64_t rows : {1, 8, 9, 17}) {
    Case codes = nvfp4_case(rows, 48, 2176);
    codes.x_codes = true, codes.poison = rows == 8;
    check(codes);
  }
}

TEST(codes_of_x_give_the_bytes_of_their_numbers) {
  for (const int64_t rows : {3, 16}) {
    Case c = nvfp4_case(rows, 32, 2304);
    c.x_codes = true;
    Operands o(c, 11);
    const std::vector<uint8_t> by_codes = Device(o, 0.37f).run(c);
    c.x_codes = false;
    o.x.resize(rows * c.depth * 2);
    for (int64_t i = 0; i < rows * c.depth; ++i)
      reference::put(o.x.data(), ElementType::kBF16, i, static_cast<float>(o.a[i]));
    CHECK(Device(o, 0.37f).run(c) == by_codes);
  }
}

/// Blocks of 64, 32 and 16 weight rows, the last of which repeats rows of the one before.
TEST(blocks_of_any_size_give_the_same_bytes) {
  const Case narrow = int4_case(4, 112, 256, 128);
  const Operands o(narrow, 9);
  const std::vector<uint8_t> expected = Device(o, 0.5f).run(narrow);
  for (const int64_t copies : {35, 69}) {  // 3920 and 7728 weight rows: blocks of 32 and of 64 rows
    Operands many = o;
    for (std::vector<uint8_t>* array : {&many.w, &many.w_scale, &many.zero_point}) {
      const std::vector<uint8_t> once = *array;
      for (int64_t i = 1; i < copies; ++i) array->insert(array->end(), once.begin(), once.end());
    }
    Case wide = narrow;
    wide.columns *= copies;
    const std::vector<uint8_t> result = Device(many, 0.5f).run(wide);
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t i = 0; i < copies; ++i)
        CHECK(
            std::equal(&expected[row * 112 * 4], &expected[row * 112 * 4] + 112 * 4, &result[(row * copies + i) * 112 * 4]));
  }
}

TEST(the_weight_is_read_once_for_16_rows) {
  for (const int64_t rows : {1, 8, 16})
    for (const bool streamed : {false, true}) {
      const int64_t depth = streamed ? 1024 : 1040;
      const Case c = nvfp4_case(rows, 128, depth);
      const check::Given given(describe(c));
      Device device(Operands(c, 7), 1.0f);
      device.run(c);
      CHECK_EQ(device.w.traffic().read, static_cast<uint64_t>(128 * depth / 2));
      CHECK_EQ(device.w_scale.traffic().read, static_cast<uint64_t>(128 * depth / 16));
      CHECK_EQ(device.x.traffic().read, static_cast<uint64_t>(rows * depth * 2 * (streamed ? 8 : 1)));  // once a block
      CHECK_EQ(device.result->traffic().written, static_cast<uint64_t>(rows * 128 * 4));
      const size_t shared = streamed ? 4 : 5;  // blocks share K
      CHECK_EQ(device.workspace->size(), shared * rows * 128 * 4);
    }
}

TEST(what_no_kernel_serves_is_refused) {
  cuda::MatmulDecodeProblem p{};
  p.rows = p.columns = p.depth = 64;
  for (const cuda::DecodedWeight& w : {cuda::DecodedWeight{WeightType::kNvfp4, nullptr, nullptr, nullptr, 32, false},
                                       cuda::DecodedWeight{WeightType::kInt4, nullptr, nullptr, nullptr, 48, false},
                                       cuda::DecodedWeight{WeightType::kInt4, nullptr, nullptr, nullptr, 32, true}}) {
    p.w = w;
    CHECK_EQ(cuda::launch(p, nullptr), cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace jaxlowprec
