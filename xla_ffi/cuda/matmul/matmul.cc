#include "matmul.h"

#include "../decode.h"
#include "../errors.h"
#include "../weight_only/matmul_decode.h"
#include "cublaslt.h"
#include "layouts.h"
#include "matmul_plan.h"
#include "rebase.h"

namespace jaxlowprec {
namespace cuda {
namespace {

struct Device {
  int index = 0, capability = 0;

  Device() {
    int major = 0, minor = 0;
    status = cudaGetDevice(&index);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    capability = 10 * major + minor;
  }
  cudaError_t status;
};

/// The problem of one entry of the batch.
MatmulProblem entry(const MatmulProblem& p, int64_t i) {
  const auto operand = [&](MatmulOperand o, int64_t rows) {
    o.data += i * rows * o.format.row_bytes(o.columns);
    o.scale += i * o.format.scales(rows, o.columns) * o.format.scale_bytes();
    return o;
  };
  MatmulProblem q = p;
  q.batch = 1, q.a = operand(p.a, p.rows), q.b = operand(p.b, p.columns);
  const int64_t bytes = i * p.rows * p.columns * element_bytes(p.type);
  q.result = static_cast<uint8_t*>(p.result) + bytes;
  if (p.accumulate) q.accumulate = static_cast<const uint8_t*>(p.accumulate) + bytes;
  return q;
}

/// An operand as cuBLASLt gets it; decoded, re-based, or its scales brought into order, in `memory`.
cudaError_t convert(GemmOperand& to, const MatmulOperand& from, int64_t rows, int64_t depth, MatmulRoute route,
                    uint8_t* memory, cudaStream_t stream) {
  if (route == MatmulRoute::kDecoded) {
    to = {GemmType::kBF16, memory, rows, GemmScaling::kNone, nullptr};
    return launch(DecodeProblem{from, 1, rows, depth, decoded_width(depth), memory}, stream);
  }
  if (route == MatmulRoute::kRebased) {
    uint8_t* const scales = memory + rows * rebased_width(depth);
    to = {GemmType::kE4M3, memory, rows, gemm_scaling(route, from.format), scales};
    return launch(RebaseProblem{from, rows, memory, reinterpret_cast<float*>(scales)}, stream);
  }
  to = {*gemm_type(from.format.code), from.data, rows, gemm_scaling(route, from.format), memory};
  if (to.scaling == GemmScaling::kNone) return cudaSuccess;
  return launch(ScaleLayoutProblem{from.format, from.scale, 1, rows, depth, memory}, stream);
}

/// Few rows of a: cuBLASLt has no part in it.
std::string multiply_small(const MatmulProblem& p, const MatmulPlan& plan, const float* alpha, uint8_t* workspace,
                           cudaStream_t stream) {
  MatmulDecodeProblem small{};
  small.x = p.a;
  small.w = {WeightType::kNvfp4, p.b.data, p.b.scale, nullptr, p.b.format.block, p.b.format.tiles};
  small.alpha = alpha, small.rows = p.rows, small.columns = p.columns, small.depth = p.depth();
  small.result = p.result, small.type = p.type, small.workspace = workspace;
  if (matmul_decode_workspace_bytes(small) > plan.workspace_bytes()) return "its workspace is too small";
  const cudaError_t status = launch(small, stream);
  return status == cudaSuccess ? "" : reason(status);
}

GemmLaunch multiply_by(MatmulRoute route, const MatmulProblem& p, const MatmulPlan& plan, const float* alpha_beta,
                       uint8_t* workspace, int device, cudaStream_t stream) {
  Gemm gemm{};
  gemm.depth = gemm_depth(route, p.depth());
  gemm.result_type = p.type == ElementType::kF32 ? GemmType::kF32 : GemmType::kBF16;
  gemm.result = p.result, gemm.accumulate = p.accumulate, gemm.alpha_beta = alpha_beta;
  uint8_t* const a = workspace;
  uint8_t* const b = a + plan.a_bytes;
  gemm.workspace = b + plan.b_bytes, gemm.workspace_bytes = plan.gemm_bytes;
  cudaError_t status = convert(gemm.a, p.a, p.rows, p.depth(), route, a, stream);
  if (status == cudaSuccess) status = convert(gemm.b, p.b, p.columns, p.depth(), route, b, stream);
  if (status != cudaSuccess) return {reason(status)};
  if (route == MatmulRoute::kTensor) {
    // alpha as the scale of a: then 1 and beta are the host's, and no kernel multiplies a result that nobody wrote by a
    // beta of 0 that it reads from the device's memory.
    gemm.a.scaling = GemmScaling::kFloat32, gemm.a.scale = alpha_beta, gemm.alpha_beta = nullptr;
  }
  return launch(gemm, device, stream);
}

std::string multiply(const MatmulProblem& p, const MatmulPlan& plan, const float* alpha_beta, uint8_t* workspace, int device,
                     cudaStream_t stream) {
  const GemmLaunch launched = multiply_by(plan.route, p, plan, alpha_beta, workspace, device, stream);
  if (!launched.no_algorithm || plan.route == MatmulRoute::kDecoded) return launched.problem;
  if (plan.may_decode) return multiply_by(MatmulRoute::kDecoded, p, plan, alpha_beta, workspace, device, stream).problem;
  const std::string what = launched.problem + " (M " + std::to_string(p.rows) + ", N " + std::to_string(p.columns) + ", K " +
                           std::to_string(p.depth()) + "): ";
  if (!decodes_exactly(p))
    return what +
           "FP8 blocks whose scales are not powers of two cannot be decoded to bfloat16 instead; quantise with "
           "power_of_two=True, or pass implementation=\"reference\"";
  return what + "pass precision=\"highest\", which decodes both operands to bfloat16, or implementation=\"reference\"";
}

}  // namespace

std::string prepare_matmul() {
  const Device device;
  return device.status == cudaSuccess ? prepare_gemm(device.index) : reason(device.status);
}

std::string launch(const MatmulProblem& problem, const MatmulResources& resources, cudaStream_t stream) {
  const Device device;
  if (device.status != cudaSuccess) return reason(device.status);
  const MatmulPlan plan = plan_matmul(problem, device.capability);
  if (!plan.problem.empty()) return plan.problem;
  if (plan.workspace_bytes() > resources.workspace_bytes)
    return "its workspace has " + std::to_string(resources.workspace_bytes) + " bytes, this GPU needs " +
           std::to_string(plan.workspace_bytes()) + ": compile it for compute capability " +
           std::to_string(device.capability / 10) + "." + std::to_string(device.capability % 10);
  const uintptr_t start = round_up(reinterpret_cast<intptr_t>(resources.workspace), MatmulPlan::kAlignment);
  uint8_t* const workspace = reinterpret_cast<uint8_t*>(start);
  for (int64_t i = 0; i < problem.batch; ++i) {
    const float* alpha_beta = resources.alpha_beta ? resources.alpha_beta + 2 * i : nullptr;
    const MatmulProblem one = entry(problem, i);
    const std::string failed = plan.route == MatmulRoute::kSmall
                                   ? multiply_small(one, plan, alpha_beta, workspace, stream)
                                   : multiply(one, plan, alpha_beta, workspace, device.index, stream);
    if (!failed.empty()) return failed;
  }
  return "";
}

}  // namespace cuda
}  // namespace jaxlowprec
