// The Python module jaxlowprec._native: the FFI handlers as capsules, and what this build can run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../cpu/dispatch.h"
#include "cpu_handlers.h"
#include "cuda_build.h"

namespace nb = nanobind;

namespace {

nb::capsule handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

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
  m.def("isa", [] { return std::string(jaxlowprec::kernels().isa); });
  m.def("available_isas", &jaxlowprec::available_isas);
  m.def("use_isa", &jaxlowprec::use_isa);
}
