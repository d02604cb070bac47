// The Python module jaxlowprec._native: the FFI handlers as capsules, and what this build can run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../cpu/kernels.h"
#include "../cuda/matmul/matmul_plan.h"
#include "../cuda/producers/norm_parts.h"
#include "../cuda/statistics/parts.h"
#include "../cuda/weight_only/weight_only_plan.h"
#include "cuda_build.h"
#include "format.h"
#include "handlers.h"

#if defined(JLP_CUDA)
#include "../cuda/errors.h"
#include "../cuda/matmul/cublaslt.h"
#endif

namespace nb = nanobind;

namespace {

nb::capsule handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

/// A format from the dictionary that a custom call takes, too.
jaxlowprec::Format format(const nb::dict& attributes) {
  const auto field = [&](const char* name) { return nb::object(attributes[name]); };
  const auto text = [&](const char* name) { return nb::cast<std::string>(field(name)); };
  auto found = jaxlowprec::make_format(text("element"), text("scaling"), text("scale_rule"),
                                       nb::cast<int32_t>(nb::int_(field("block"))), nb::cast<bool>(field("tiles")),
                                       nb::cast<bool>(field("power_of_two")),
                                       static_cast<float>(nb::cast<double>(nb::float_(field("amax_epsilon")))));
  if (!found) throw nb::value_error("no such format");
  found->column_major = attributes.contains("column_major");
  return *found;
}

/// Why a GEMM has no way on a GPU of that compute capability (90 for 9.0), else empty; the workspace that it needs; what
/// multiplies; and how far its sums may be off, as SumError in cuda/gemm_error.h.
nb::tuple cuda_matmul_plan(const nb::dict& a_format, const nb::dict& b_format, int64_t rows, int64_t columns, int64_t depth,
                           bool accumulate, bool float32_sums, int capability) {
  jaxlowprec::MatmulProblem p{};
  p.a.format = format(a_format), p.b.format = format(b_format);
  p.a.columns = p.b.columns = depth;
  p.rows = rows, p.columns = columns, p.accumulate = accumulate ? &p : nullptr;  // whether, not where
  p.float32_sums = float32_sums;
  const auto plan = jaxlowprec::cuda::plan_matmul(p, capability);
  const auto error = jaxlowprec::cuda::sum_error(plan.route, capability, depth);
  return nb::make_tuple(plan.problem, plan.workspace_bytes(), jaxlowprec::cuda::route_name(plan.route),
                        nb::make_tuple(error.expected, error.largest));
}

/// Why the GPU's kernel for few rows of bfloat16 by a quantised weight does not take a product, else empty; and its
/// workspace.
nb::tuple cuda_weight_only_plan(const nb::dict& weight_format, const std::string& x_type, const std::string& scale_type,
                                int64_t rows, int64_t depth, int capability) {
  const auto type = [](const std::string& name) {
    return name == "bfloat16"  ? jaxlowprec::ElementType::kBF16
           : name == "float16" ? jaxlowprec::ElementType::kF16
                               : jaxlowprec::ElementType::kF32;
  };
  jaxlowprec::WeightOnlyProblem p{};
  p.weight.format = format(weight_format), p.weight.format.scale_type = type(scale_type);
  p.x_type = type(x_type), p.rows = rows, p.depth = depth;
  const auto plan = jaxlowprec::cuda::plan_weight_only(p, capability);
  return nb::make_tuple(plan.problem, plan.workspace_bytes);
}

#if defined(JLP_CUDA)

/// By target: the handler, or one for each stage.
nb::dict cuda_handlers() {
  nb::dict handlers;
#define JLP_REGISTER(name) handlers["jaxlowprec_" #name] = handler(jaxlowprec::jaxlowprec_##name##_cuda);
  JLP_HANDLERS(JLP_REGISTER)
#undef JLP_REGISTER
  nb::dict matmul;
  matmul["prepare"] = handler(jaxlowprec::jaxlowprec_scaled_matmul_cuda_prepare);
  if (jaxlowprec::cuda::times_algorithms())
    matmul["initialize"] = handler(jaxlowprec::jaxlowprec_scaled_matmul_cuda_initialize);
  matmul["execute"] = nb::object(handlers["jaxlowprec_scaled_matmul"]);
  handlers["jaxlowprec_scaled_matmul"] = matmul;
  return handlers;
}
std::string cuda_driver_problem() { return jaxlowprec::cuda::driver_problem(); }

#else

nb::dict cuda_handlers() { return {}; }
std::string cuda_driver_problem() { return ""; }

#endif

}  // namespace

NB_MODULE(_native, m) {
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("cpu_handlers", [] {
    nb::dict handlers;
#define JLP_REGISTER(name) handlers["jaxlowprec_" #name] = handler(jaxlowprec::jaxlowprec_##name);
    JLP_HANDLERS(JLP_REGISTER)
    JLP_CPU_HANDLERS(JLP_REGISTER)
#undef JLP_REGISTER
    return handlers;
  });
  m.def("cuda_handlers", &cuda_handlers);
  m.def("cuda_driver_problem", &cuda_driver_problem);  // why nothing can run on a GPU here, else empty
  m.def("cuda_matmul_plan", &cuda_matmul_plan);
  m.def("cuda_weight_only_plan", &cuda_weight_only_plan);
  m.def("cuda_statistics_workspaces", [] {  // bytes for one matrix, and for each more: of `moments`, of `sums`
    const auto sizes = [](auto workspace) { return nb::make_tuple(workspace(1), workspace(2) - workspace(1)); };
    return nb::make_tuple(sizes(jaxlowprec::cuda::workspace_for<jaxlowprec::cuda::MomentsOfPart>),
                          sizes(jaxlowprec::cuda::workspace_for<jaxlowprec::cuda::SumsOfPart>));
  });
  m.def("cuda_norm_gradient_parts", [](int64_t batch, int64_t rows) {  // of each matrix; so many sums the workspace has
    return jaxlowprec::cuda::NormGradientParts(batch, rows).count;
  });
  m.attr("no_cuda") = jaxlowprec::kNoCuda;
  m.attr("cuda_version") = jaxlowprec::kCudaVersion;
  m.attr("cuda_architectures") = jaxlowprec::kCudaArchitectures;
  m.def("isa", [] { return std::string(jaxlowprec::kernels().isa); });
  m.def("available_isas", &jaxlowprec::available_isas);
  m.def("use_isa", &jaxlowprec::use_isa);
}
