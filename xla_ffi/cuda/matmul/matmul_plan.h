// Chooses how a GEMM of quantised operands is computed on a GPU, and its workspace. The choice depends only on formats,
// sizes and compute capability, so it is known when a program is compiled. No device is asked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "../../problems.h"
#include "gemm.h"
#include "gemm_error.h"

namespace jaxlowprec {
namespace cuda {

/// A description of a route for users.
inline const char* route_name(MatmulRoute route) {
  switch (route) {
    case MatmulRoute::kNone: return "";
    case MatmulRoute::kSmall: return "4-bit codes decoded in registers";
    case MatmulRoute::kDecoded: return "codes decoded to bfloat16, exactly";
    case MatmulRoute::kTensor: return "FP8 tensor cores";
    case MatmulRoute::kLines: return "FP8 tensor cores, scales of lines";
    case MatmulRoute::kInt8: return "INT8 tensor cores, exact sums";
    case MatmulRoute::kNibbles: return "INT8 tensor cores, 4-bit codes unpacked in registers, exact sums of groups";
    case MatmulRoute::kBlock128: return "FP8 tensor cores, scales of 128";
    case MatmulRoute::kRebased: return "4-bit codes re-based to FP8 with scales of 128, FP8 tensor cores";
    case MatmulRoute::kMX: return "FP8 tensor cores, scales of 32";
    case MatmulRoute::kWidened: return "4-bit codes as FP8 codes, exactly, FP8 tensor cores, scales of 32";
    case MatmulRoute::kNVFP4: return "FP4 tensor cores";
  }
  return "";
}

/// Most rows of a for which reading b's codes takes longer than multiplying by them.
constexpr int64_t kSmallRows = 16;
/// Below this K (one block) a GEMM of FP8 blocks keeps room to be decoded, at most 256 bytes per row: cuBLASLt's manual does
/// not say whether there is a least K.
constexpr int64_t kBlock128Depth = 128;
/// With scales of 128 rows of `a` are a multiple of 4. Python pads them, to at least 16: few of cuBLASLt's algorithms have a
/// narrower tile.
constexpr int64_t kScaledRows = 4, kLeastScaledRows = 16;
/// Blocks that matmul_decode.h splits K for, each of 128 columns of the result: two per multiprocessor of an H100.
constexpr int64_t kSmallBlocks = 264;
/// At least what it needs for partial sums: those of so many blocks, or, without splits, none.
constexpr int64_t kSmallSums = 4 * kSmallRows * kSmallBlocks * 128;

struct MatmulPlan {
  MatmulRoute route = MatmulRoute::kNone;
  std::string problem;  // why there is no route; else empty
  // Of one batch entry, in this order; each a multiple of kAlignment.
  int64_t a_bytes = 0, b_bytes = 0, gemm_bytes = 0;  // what a and b (or their scales) become, and cuBLASLt's own
  int64_t sums_bytes = 0;                            // that line_scales.h makes the result of
  // Whether a and b may be decoded where cuBLASLt has no algorithm for the route: the workspace has room for it.
  bool may_decode = false;

  /// XLA aligns buffers to 128 bytes, cuBLASLt wants 256 for its own.
  static constexpr int64_t kAlignment = 256;
  int64_t workspace_bytes() const { return a_bytes + b_bytes + gemm_bytes + sums_bytes + kAlignment; }
};

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Whether both operands are exact in bfloat16 when decoded, up to the tensor's scale.
inline bool decodes_exactly(const MatmulProblem& p) {
  const auto exact = [](const Format& f) { return f.scaling != Scaling::kFloat32 || f.power_of_two; };
  return exact(p.a.format) && exact(p.b.format);
}

/// Whether the tensor cores of 9.0 may have two MXFP4 operands in scales of 128, or b to FP8 blocks of whole 128s.
inline bool rebases(const MatmulProblem& p) {
  const bool a = p.a.format.scaling == Scaling::kFloat32 ? p.depth() % p.a.format.block == 0 : rebase_supports(p.a);
  return a && rebase_supports(p.b) && p.rows >= kLeastScaledRows && p.rows % kScaledRows == 0 &&
         p.columns % kScaledRows == 0;
}

/// `capability` is 90 for 9.0.
inline MatmulRoute matmul_route(const MatmulProblem& p, int capability, std::string& problem) {
  const Format &a = p.a.format, &b = p.b.format;
  const bool fast = !p.float32_sums && gemm_type(a.code) && gemm_type(b.code);  // FP8 and FP4 tensor cores are allowed
  switch (a.scaling) {
    case Scaling::kTwoLevel:
      if (p.rows <= kSmallRows && !p.accumulate) return MatmulRoute::kSmall;  // bound by the weight's bytes
      return capability >= 100 && fast ? MatmulRoute::kNVFP4 : MatmulRoute::kDecoded;
    case Scaling::kE8M0:  // cuBLASLt multiplies neither MXFP4 nor MXFP8 by MXFP4
      if (capability == 90 && fast && rebases(p)) return MatmulRoute::kRebased;
      if (capability < 100 || !fast) return MatmulRoute::kDecoded;
      if (!a.packed() && !b.packed()) return MatmulRoute::kMX;
      return p.a.columns == p.b.columns && p.depth() % a.block == 0 ? MatmulRoute::kWidened : MatmulRoute::kDecoded;
    case Scaling::kTensor: return capability >= 89 && fast ? MatmulRoute::kTensor : MatmulRoute::kDecoded;
    case Scaling::kFloat16: problem = "Int4 is a format of weights"; return MatmulRoute::kNone;
    case Scaling::kRows:
      if (b.scaling != Scaling::kRows) return MatmulRoute::kNibbles;
      if (a.code == CodeType::kInt8) return MatmulRoute::kInt8;
      if (!fast || capability < 89) return MatmulRoute::kDecoded;
      return capability == 90 ? MatmulRoute::kLines : MatmulRoute::kTensor;  // cuBLASLt has scales of lines on 9.0 alone
    case Scaling::kFloat32: break;
  }
  if (capability == 90 && fast && b.scaling == Scaling::kFloat32) return MatmulRoute::kBlock128;
  if (capability == 90 && fast && rebases(p)) return MatmulRoute::kRebased;
  const auto in_columns = [&](const Format& f) { return f.column_major && f.scale_columns(p.depth()) > 1; };
  if (in_columns(a) || in_columns(b)) {
    problem = "the scales lie in the order of compute capability 9.0: compile the program for this GPU";
    return MatmulRoute::kNone;
  }
  if (decodes_exactly(p)) return MatmulRoute::kDecoded;  // Python makes MXFP8 of them where it knows the GPU
  const std::string blocks = "FP8 blocks with float32 scales that are not powers of two";
  const std::string remedy = "quantise with power_of_two=True, or pass implementation=\"reference\"";
  if (capability == 90)
    problem = blocks + " have no exact bfloat16, which sums in float32 (precision=\"highest\") need: " + remedy +
              ", or leave out precision";
  else
    problem = blocks + " have tensor cores only on compute capability 9.0, and no exact bfloat16: " + remedy;
  return MatmulRoute::kNone;
}

/// Whether cuBLASLt has no part in a route.
inline bool has_own_kernel(MatmulRoute route) { return route == MatmulRoute::kSmall || route == MatmulRoute::kNibbles; }

/// Whether the scales of lines are applied to the GEMM's sums.
inline bool scales_sums(const MatmulProblem& p, MatmulRoute route) {
  return p.a.format.scaling == Scaling::kRows && route != MatmulRoute::kLines;
}

/// The order of an operand's scales on a route.
inline GemmScaling gemm_scaling(MatmulRoute route, const Format& format) {
  switch (route) {
    case MatmulRoute::kBlock128: return format.tiles ? GemmScaling::kFloat32x128x128 : GemmScaling::kFloat32x128;
    case MatmulRoute::kRebased: return GemmScaling::kFloat32x128;
    case MatmulRoute::kLines: return GemmScaling::kFloat32Lines;
    case MatmulRoute::kMX:
    case MatmulRoute::kWidened: return GemmScaling::kE8M0x32;
    case MatmulRoute::kNVFP4: return GemmScaling::kE4M3x16;
    default: return GemmScaling::kNone;
  }
}

/// Whether an operand's codes and scales become others for a route; FP8 blocks have scales of 128 already.
inline bool rebased(MatmulRoute route, const Format& format) {
  return route == MatmulRoute::kRebased && format.scaling == Scaling::kE8M0;
}

/// Elements of a row of a decoded operand: rows of 16 bytes.
inline int64_t decoded_width(int64_t depth) { return round_up(depth, 8); }

/// The K that cuBLASLt gets.
inline int64_t gemm_depth(MatmulRoute route, int64_t depth) {
  switch (route) {
    case MatmulRoute::kDecoded: return decoded_width(depth);
    case MatmulRoute::kRebased: return rebased_width(depth);
    default: return depth;
  }
}

/// Bytes of an operand's widened codes, before its scales.
inline int64_t widened_bytes(MatmulRoute route, const Format& format, int64_t rows, int64_t depth) {
  return route == MatmulRoute::kWidened && format.packed() ? round_up(rows * depth, MatmulPlan::kAlignment) : 0;
}

inline MatmulPlan plan_matmul(const MatmulProblem& p, int capability) {
  MatmulPlan plan;
  if (capability < 80) {
    plan.problem = "GPUs below compute capability 8.0 have no bfloat16 tensor cores: pass implementation=\"reference\"";
    return plan;
  }
  plan.route = matmul_route(p, capability, plan.problem);
  if (plan.route == MatmulRoute::kNone || plan.route == MatmulRoute::kNibbles) return plan;
  const int64_t decoded_row = 2 * decoded_width(p.depth());
  if (plan.route == MatmulRoute::kSmall) {
    plan.a_bytes = round_up(p.rows * decoded_row, MatmulPlan::kAlignment), plan.b_bytes = kSmallSums;
    return plan;
  }
  plan.may_decode = plan.route == MatmulRoute::kBlock128 && p.depth() < kBlock128Depth && decodes_exactly(p);
  const auto bytes = [&](const Format& format, int64_t rows) {
    const int64_t decoded = round_up(rows * decoded_row, MatmulPlan::kAlignment);
    if (plan.route == MatmulRoute::kDecoded) return decoded;
    if (rebased(plan.route, format)) return round_up(rebased_bytes(rows, p.depth()), MatmulPlan::kAlignment);
    if (gemm_scaling(plan.route, format) == GemmScaling::kNone) return int64_t{0};
    const int64_t given = gemm_scales_in_order(format, rows, p.depth()) ? 0 : gemm_scale_bytes(format, rows, p.depth());
    const int64_t scales = round_up(given, MatmulPlan::kAlignment) + widened_bytes(plan.route, format, rows, p.depth());
    return plan.may_decode ? std::max(decoded, scales) : scales;
  };
  plan.a_bytes = bytes(p.a.format, p.rows), plan.b_bytes = bytes(p.b.format, p.columns);
  plan.gemm_bytes = kGemmWorkspace;
  if (scales_sums(p, plan.route)) plan.sums_bytes = round_up(4 * p.rows * p.columns, MatmulPlan::kAlignment);
  return plan;
}

}  // namespace cuda
}  // namespace jaxlowprec
