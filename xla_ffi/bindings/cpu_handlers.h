// The XLA FFI handlers of the CPU kernels, one an operation. Shapes: see the operations' op.py in jaxlowprec/ops.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxlowprec {

extern "C" XLA_FFI_Error* jaxlowprec_amax(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_quantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_dequantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_hadamard(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_scaled_matmul(XLA_FFI_CallFrame*);

}  // namespace jaxlowprec
