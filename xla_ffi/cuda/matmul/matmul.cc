#include "matmul.h"

#include "../decode.h"
#include "../errors.h"
#include "../weight_only/matmul_decode.h"
#include "cublaslt.h"
#include "int8_by_nibbles.h"
#include "layouts.h"
#include "line_scales.h"
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

/// An operand as cuBLASLt gets it; decoded, re-based, or its scales in order, in `memory`; or where they lie in order.
GemmOperand gemm_operand(const MatmulOperand& from, int64_t rows, MatmulRoute route, const uint8_t* memory) {
  if (const int64_t codes = widened_bytes(route, from.format, rows, from.columns))
    return {GemmType::kE4M3, memory, rows, GemmScaling::kE8M0x32, memory + codes};
  const GemmScaling scaling = gemm_scaling(route, from.format);
  if (route == MatmulRoute::kDecoded) return {GemmType::kBF16, memory, rows, GemmScaling::kNone, nullptr};
  if (rebased(route, from.format))
    return {GemmType::kE4M3, memory, rows, scaling, memory + rows * rebased_width(from.columns)};
  const bool in_order = gemm_scales_in_order(from.format, rows, from.columns);
  return {*gemm_type(from.format.code), from.data, rows, scaling, in_order ? from.scale : memory};
}

/// Puts there what gemm_operand says is in `memory`.
cudaError_t convert(const MatmulOperand& from, int64_t rows, int64_t depth, MatmulRoute route, uint8_t* memory,
                    cudaStream_t stream) {
  if (route == MatmulRoute::kDecoded)
    return launch(DecodeProblem{from, 1, rows, depth, decoded_width(depth), memory}, stream);
  if (rebased(route, from.format))
    return launch(RebaseProblem{from, rows, memory, reinterpret_cast<float*>(memory + rows * rebased_width(depth))}, stream);
  if (const int64_t codes = widened_bytes(route, from.format, rows, depth)) {
    if (const cudaError_t status = launch(WidenProblem{from, rows, memory}, stream); status != cudaSuccess) return status;
    memory += codes;
  }
  if (gemm_scaling(route, from.format) == GemmScaling::kNone || gemm_scales_in_order(from.format, rows, depth))
    return cudaSuccess;
  return launch(ScaleLayoutProblem{from.format, from.scale, 1, rows, depth, memory}, stream);
}

/// An entry of the batch, and where it is multiplied.
struct Entry {
  const MatmulProblem p;
  const MatmulPlan& plan;
  const float* alpha_beta;
  uint8_t* workspace;
  int device;

  uint8_t* a() const { return workspace; }
  uint8_t* b() const { return a() + plan.a_bytes; }
  uint8_t* sums() const { return b() + plan.b_bytes + plan.gemm_bytes; }

  Gemm gemm(MatmulRoute route) const {
    Gemm gemm{};
    gemm.depth = gemm_depth(route, p.depth());
    gemm.a = gemm_operand(p.a, p.rows, route, a()), gemm.b = gemm_operand(p.b, p.columns, route, b());
    gemm.result_type = p.type == ElementType::kF32 ? GemmType::kF32 : GemmType::kBF16;
    gemm.result = p.result, gemm.accumulate = p.accumulate, gemm.alpha_beta = alpha_beta;
    gemm.workspace = b() + plan.b_bytes, gemm.workspace_bytes = plan.gemm_bytes;
    if (scales_sums(p, route)) {
      gemm.result_type = route == MatmulRoute::kInt8 ? GemmType::kI32 : GemmType::kF32;
      gemm.result = sums(), gemm.accumulate = nullptr;
    } else if (route == MatmulRoute::kTensor) {
      // alpha as the scale of a: then 1 and beta are the host's, and no kernel multiplies a result that nobody wrote by a
      // beta of 0 that it reads from the device's memory.
      gemm.a.scaling = GemmScaling::kFloat32, gemm.a.scale = alpha_beta, gemm.alpha_beta = nullptr;
    }
    return gemm;
  }
};

std::string multiply_small(const Entry& e, cudaStream_t stream) {
  MatmulDecodeProblem small{};
  small.x = e.p.a;
  small.w = {WeightType::kNvfp4, e.p.b.data, e.p.b.scale, nullptr, e.p.b.format.block, e.p.b.format.tiles};
  small.alpha = e.alpha_beta, small.rows = e.p.rows, small.columns = e.p.columns, small.depth = e.p.depth();
  small.result = e.p.result, small.type = e.p.type, small.workspace = e.workspace;
  if (matmul_decode_workspace_bytes(small) > e.plan.workspace_bytes()) return "its workspace is too small";
  const cudaError_t status = launch(small, stream);
  return status == cudaSuccess ? "" : reason(status);
}

std::string multiply_nibbles(const Entry& e, cudaStream_t stream) {
  const MatmulProblem& p = e.p;
  if (!p.b.format.column_major) return "the scales of its weight do not lie group by group";
  const cudaError_t status =
      launch(Int8ByNibblesProblem{p.a.data, reinterpret_cast<const float*>(p.a.scale), p.b.format, p.b.data, p.b.scale,
                                  p.rows, p.columns, p.a.columns, p.accumulate, p.result, p.type},
             stream);
  return status == cudaSuccess ? "" : reason(status);
}

GemmLaunch multiply_by(MatmulRoute route, const Entry& e, cudaStream_t stream) {
  cudaError_t status = convert(e.p.a, e.p.rows, e.p.depth(), route, e.a(), stream);
  if (status == cudaSuccess) status = convert(e.p.b, e.p.columns, e.p.depth(), route, e.b(), stream);
  if (status != cudaSuccess) return {reason(status)};
  const GemmLaunch launched = launch(e.gemm(route), e.device, stream);
  const MatmulProblem& p = e.p;
  if (!launched.problem.empty() || !scales_sums(p, route)) return launched;
  const auto scales = [](const MatmulOperand& o) { return reinterpret_cast<const float*>(o.scale); };
  status = launch(LineScalesProblem{e.sums(), route == MatmulRoute::kInt8, p.rows, p.columns, scales(p.a), scales(p.b),
                                    p.accumulate, p.result, p.type},
                  stream);
  return {status == cudaSuccess ? "" : reason(status)};
}

/// Memory for GEMMs that are timed, one after another.
class Scratch {
 public:
  Scratch(const Allocate& allocate, cudaStream_t stream) : allocate_(allocate), stream_(stream) {}

  /// The result is as aligned as it was: algorithms may depend on that.
  std::string move(Gemm& gemm) {
    constexpr int64_t kStep = MatmulPlan::kAlignment;
    const int64_t result = gemm.a.rows * gemm.b.rows * (gemm.result_type == GemmType::kBF16 ? 2 : 4);
    const int64_t bytes = 3 * kStep + gemm.workspace_bytes + result;
    if (bytes > bytes_) memory_ = static_cast<uint8_t*>(allocate_(bytes)), bytes_ = memory_ ? bytes : 0;
    if (!memory_)
      return "no " + std::to_string(bytes) + " bytes are left to time its algorithms in: free memory, or unset " +
             "JAXLOWPREC_GEMM_ALGORITHM";
    uint8_t* const start = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<intptr_t>(memory_), kStep));
    if (gemm.alpha_beta) {
      const float alpha_beta[2] = {1, gemm.accumulate ? 1.0f : 0.0f};
      gemm.alpha_beta = reinterpret_cast<const float*>(start);
      const cudaError_t status = cudaMemcpyAsync(start, alpha_beta, sizeof alpha_beta, cudaMemcpyHostToDevice, stream_);
      if (status != cudaSuccess) return reason(status);
    }
    gemm.workspace = start + kStep;
    gemm.result = start + kStep + gemm.workspace_bytes + reinterpret_cast<uintptr_t>(gemm.result) % kStep;
    return "";
  }

 private:
  const Allocate& allocate_;
  const cudaStream_t stream_;
  uint8_t* memory_ = nullptr;
  int64_t bytes_ = 0;
};

/// By its plan's route, or decoded where cuBLASLt has no algorithm for that one: by(route) multiplies, or times.
template <class By>
std::string multiply(const Entry& e, const By& by) {
  const MatmulProblem& p = e.p;
  const GemmLaunch launched = by(e.plan.route);
  if (!launched.no_algorithm || e.plan.route == MatmulRoute::kDecoded) return launched.problem;
  if (e.plan.may_decode) return by(MatmulRoute::kDecoded).problem;
  const std::string what = launched.problem + " (M " + std::to_string(p.rows) + ", N " + std::to_string(p.columns) + ", K " +
                           std::to_string(p.depth()) + "): ";
  if (!decodes_exactly(p))
    return what +
           "FP8 blocks whose scales are not powers of two cannot be decoded to bfloat16 instead; quantise with "
           "power_of_two=True, or pass implementation=\"reference\"";
  return what + "pass precision=\"highest\", which decodes both operands to bfloat16, or implementation=\"reference\"";
}

/// What visit() says of the entries of the batch, up to the first that has a problem.
template <class Visit>
std::string for_each_entry(const MatmulProblem& problem, const MatmulResources& resources, const Visit& visit) {
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
    const std::string failed = visit(Entry{entry(problem, i), plan, alpha_beta, workspace, device.index});
    if (!failed.empty()) return failed;
  }
  return "";
}

}  // namespace

std::string prepare_matmul() {
  const Device device;
  return device.status == cudaSuccess ? prepare_gemm(device.index) : reason(device.status);
}

std::string launch(const MatmulProblem& problem, const MatmulResources& resources, cudaStream_t stream) {
  return for_each_entry(problem, resources, [&](const Entry& e) {
    if (e.plan.route == MatmulRoute::kSmall) return multiply_small(e, stream);
    if (e.plan.route == MatmulRoute::kNibbles) return multiply_nibbles(e, stream);
    return multiply(e, [&](MatmulRoute route) { return multiply_by(route, e, stream); });
  });
}

std::string time_matmul(const MatmulProblem& problem, const MatmulResources& resources, const Allocate& allocate,
                        cudaStream_t stream) {
  Scratch scratch(allocate, stream);
  const auto move = [&](Gemm& gemm) { return scratch.move(gemm); };
  return for_each_entry(problem, resources, [&](const Entry& e) {
    if (has_own_kernel(e.plan.route)) return std::string();
    return multiply(e, [&](MatmulRoute route) { return time_algorithms(e.gemm(route), e.device, move, stream); });
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
