// The Python module jaxlowprec._native: the FFI handlers as capsules, and what this build can run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../cpu/dispatch.h"
#include "cuda_build.h"
#include "handlers.h"

#if defined(JLP_CUDA)
#include "../cuda/errors.h"
#endif

namespace nb = nanobind;

namespace {

nb::capsule handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

#if defined(JLP_CUDA)

/// By target: the handler, or one for each stage.
nb::dict cuda_handlers() {
  nb::dict handlers, matmul;
  handlers["jaxlowprec_amax"] = handler(jaxlowprec::jaxlowprec_amax_cuda);
  handlers["jaxlowprec_quantize"] = handler(jaxlowprec::jaxlowprec_quantize_cuda);
  handlers["jaxlowprec_dequantize"] = handler(jaxlowprec::jaxlowprec_dequantize_cuda);
  handlers["jaxlowprec_hadamard"] = handler(jaxlowprec::jaxlowprec_hadamard_cuda);
  matmul["prepare"] = handler(jaxlowprec::jaxlowprec_scaled_matmul_cuda_prepare);
  matmul["execute"] = handler(jaxlowprec::jaxlowprec_scaled_matmul_cuda);
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
    handlers["jaxlowprec_amax"] = handler(jaxlowprec::jaxlowprec_amax);
    handlers["jaxlowprec_quantize"] = handler(jaxlowprec::jaxlowprec_quantize);
    handlers["jaxlowprec_dequantize"] = handler(jaxlowprec::jaxlowprec_dequantize);
    handlers["jaxlowprec_hadamard"] = handler(jaxlowprec::jaxlowprec_hadamard);
    handlers["jaxlowprec_scaled_matmul"] = handler(jaxlowprec::jaxlowprec_scaled_matmul);
    return handlers;
  });
  m.attr("no_cuda") = jaxlowprec::kNoCuda;
  m.attr("cuda_version") = jaxlowprec::kCudaVersion;
  m.attr("cuda_architectures") = jaxlowprec::kCudaArchitectures;
  m.def("cuda_handlers", &cuda_handlers);
  m.def("cuda_driver_problem", &cuda_driver_problem);  // why nothing can run on a GPU here, else empty
  m.def("isa", [] { return std::string(jaxlowprec::kernels().isa); });
  m.def("available_isas", &jaxlowprec::available_isas);
  m.def("use_isa", &jaxlowprec::use_isa);
}
