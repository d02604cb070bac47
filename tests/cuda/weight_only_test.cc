// Kernels: matmul_decode.cu dequantize.cu
// Few rows of bfloat16 by a batch of quantised weights: each entry's operands are found, alpha too, and results are within
// the bound of the float64 product.
#include <cuda_runtime.h>

#include "../../xla_ffi/cuda/weight_only/matmul_decode.h"
#include "../../xla_ffi/cuda/weight_only/weight_only_plan.h"
#include "../cpp/check.h"
#include "../cpp/matmul_reference.h"
#include "hostile_data.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

void check_product(const Format& format, bool zero_points, bool one_alpha) {
  constexpr int64_t kBatch = 2, kRows = 3, kColumns = 40, kDepth = 96;
  const bool int4 = format.code == CodeType::kInt4;
  const int64_t scales = kBatch * format.scales(kColumns, kDepth);
  std::vector<uint8_t> x(2 * kBatch * kRows * kDepth), scale(scales * format.scale_bytes()), zero;
  const std::vector<uint8_t> data = any_bytes(kBatch * kColumns * format.row_bytes(kDepth), 1);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < kBatch * kRows * kDepth; ++i) reference::put(x.data(), ElementType::kBF16, i, normal(random));
  for (int64_t i = 0; i < scales; ++i) {
    if (int4)
      reference::put(scale.data(), ElementType::kBF16, i, 0.01f + random() % 100 / 128.0f);
    else
      scale[i] = random() % 0x7F;
    if (zero_points) zero.push_back(random() % 16);
  }
  const std::vector<float> alphas = {0.5f, 3.0f};
  const Array<uint8_t> on_x(x, "x", Access::kReadOnly), on_data(data, "data", Access::kReadOnly),
      on_scale(scale, "scale", Access::kReadOnly), on_zero(zero, "zero point", Access::kReadOnly);
  const Array<float> on_alpha(alphas, "alpha", Access::kReadOnly);
  WeightOnlyProblem p{};
  p.batch = kBatch, p.rows = kRows, p.columns = kColumns, p.depth = kDepth;
  p.x = on_x.data(), p.x_type = ElementType::kBF16;
  p.weight = {format, on_data.data(), on_scale.data(), one_alpha ? nullptr : on_alpha.data(), kDepth};
  p.zero_point = zero_points ? on_zero.data() : nullptr;
  const cuda::WeightOnlyPlan plan = cuda::plan_weight_only(p, 90);
  CHECK_EQ(plan.problem, std::string());
  const Array<uint8_t> workspace(plan.workspace_bytes, "workspace");
  const Array<float> result(kBatch * kRows * kColumns, "result");
  p.result = result.data(), p.type = ElementType::kF32;
  CHECK_EQ(cuda::launch(p, workspace.data(), plan.workspace_bytes, nullptr), cudaSuccess);
  CHECK_EQ(cuda::launch(p, workspace.data(), 0, nullptr), cudaErrorInvalidValue);
  const MatmulOperand w{format, data.data(), scale.data(), nullptr, kDepth};
  for (int64_t i = 0; i < kBatch * kRows * kColumns; ++i) {
    const int64_t batch = i / kColumns / kRows, n = i % kColumns, line = batch * kColumns + n;
    double sum = 0, size = 0;
    for (int64_t k = 0; k < kDepth; ++k) {
      double number = 0;
      if (int4) {
        const int64_t group = line * format.blocks(kDepth) + k / format.block;
        const int code = static_cast<int>(reference::code_at(&data[line * format.row_bytes(kDepth)], k));
        const float exact =
            (code - (zero_points ? zero[group] : 8)) * reference::get(scale.data(), ElementType::kBF16, group);
        number = reference::number(reference::rounded_bits(exact, ElementType::kBF16), ElementType::kBF16);
      } else {
        number = double{reference::decoded_code(w, kColumns, batch, n, k)} *
                 reference::decoded_scale(w, kColumns, batch, n, k / format.block);
      }
      const double term = number * reference::get(x.data(), ElementType::kBF16, i / kColumns * kDepth + k);
      sum += term, size += std::abs(term);
    }
    const double alpha = one_alpha ? 1 : alphas[batch];
    CHECK(std::abs(result.data()[i] - alpha * sum) <= std::ldexp(alpha * size * kDepth, -23));
  }
}

constexpr Format kInt4Of32 = {CodeType::kInt4, Scaling::kFloat16, 32, false, ScaleRule::kUp, false, 0};

}  // namespace

TEST(nvfp4_weights) { check_product(nvfp4(), false, false); }
TEST(nvfp4_weights_in_tiles) { check_product(nvfp4(true), false, false); }
TEST(int4_weights) { check_product(kInt4Of32, false, true); }
TEST(int4_weights_with_zero_points) { check_product(kInt4Of32, true, true); }

}  // namespace jaxlowprec
