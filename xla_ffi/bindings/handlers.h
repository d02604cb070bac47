// The XLA FFI handlers, one an operation and platform. Shapes: see the operations' op.py in jaxlowprec/ops.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxlowprec {

extern "C" XLA_FFI_Error* jaxlowprec_amax(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_quantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_dequantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_hadamard(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_int4_fake_quantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_int4_quantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_int4_dequantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_scaled_matmul(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_weight_only_matmul(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_grouped_amax(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_grouped_quantize(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_grouped_matmul(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_grouped_wgrad(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_grouped_weight_only(XLA_FFI_CallFrame*);

#if defined(JLP_CUDA)
extern "C" XLA_FFI_Error* jaxlowprec_amax_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_quantize_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_dequantize_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_hadamard_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_int4_fake_quantize_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_int4_quantize_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_int4_dequantize_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_scaled_matmul_cuda(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_scaled_matmul_cuda_prepare(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_weight_only_matmul_cuda(XLA_FFI_CallFrame*);
#endif

}  // namespace jaxlowprec
