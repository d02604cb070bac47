// Which products of activations in high precision and a quantised weight the kernel of matmul_decode.h takes: by formats,
// sizes and compute capability alone, so that it is known when a program is compiled. The others are left to XLA, which
// decodes the weight and has cuBLASLt multiply.
#pragma once

#include <string>

#include "../matmul/matmul_plan.h"

namespace jaxlowprec {
namespace cuda {

/// Up to here the kernel's products with group_inverse are exact quotients, and offsets within a block's weight rows have
/// 32 bits.
constexpr int64_t kMaximumDecodeDepth = 1 << 21;

struct WeightOnlyPlan {
  std::string problem;  // why the kernel does not take it; else empty
  int64_t workspace_bytes = 0;
};

/// `capability` is 90 for 9.0.
inline WeightOnlyPlan plan_weight_only(const WeightOnlyProblem& p, int capability) {
  const Format& w = p.weight.format;
  if (capability < 80) return {"GPUs below compute capability 8.0 have no bfloat16 tensor cores"};
  if (p.x_type != ElementType::kBF16) return {"lhs is not bfloat16: cast it"};
  const bool int4 = w.code == CodeType::kInt4;
  if (!int4 && w.scaling != Scaling::kTwoLevel) return {"rhs is neither NVFP4 nor Int4"};
  if (int4 && w.scale_type != ElementType::kBF16) return {"rhs has float16 scales: quantise with scale_dtype=\"bfloat16\""};
  if (int4 && w.block % 32 != 0) return {"rhs has groups that are not a multiple of 32"};
  if (p.rows > kSmallRows) return {"lhs has more than " + std::to_string(kSmallRows) + " rows"};
  if (p.depth > kMaximumDecodeDepth) return {"the contracted axis is longer than " + std::to_string(kMaximumDecodeDepth)};
  return {"", kSmallSums + MatmulPlan::kAlignment};
}

}  // namespace cuda
}  // namespace jaxlowprec
