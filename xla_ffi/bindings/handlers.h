// The XLA FFI handlers: one per operation and platform. Shapes: see the operations' op.py in jaxlowprec/ops.
#pragma once

#include "xla/ffi/api/c_api.h"

/// The operations with handlers for CPUs and GPUs, and those whose only handlers are for CPUs: a handler is registered by
/// its line here. `each(name)`.
// clang-format off
#define JLP_HANDLERS(each)   \
  each(amax)                \
  each(line_amaxes)         \
  each(quantize)            \
  each(row_scaled_quantize) \
  each(dequantize)          \
  each(hadamard)            \
  each(activation)          \
  each(activation_gradient) \
  each(activation_quantize) \
  each(activation_gradient_quantize) \
  each(norm)                \
  each(norm_gradient)       \
  each(norm_quantize)       \
  each(sum_over_rows)       \
  each(int4_fake_quantize)  \
  each(int4_quantize)       \
  each(int4_dequantize)     \
  each(scaled_matmul)       \
  each(weight_only_matmul)  \
  each(moments)             \
  each(outliers)            \
  each(sums)                \
  each(statistics)          \
  each(optimizer_update)
#define JLP_CPU_HANDLERS(each) \
  each(grouped_amax)           \
  each(grouped_line_amaxes)    \
  each(grouped_quantize)       \
  each(grouped_matmul)         \
  each(grouped_wgrad)          \
  each(grouped_weight_only)    \
  each(weight_only_matmuls)    \
  each(intact_state)           \
  each(random_words)
// clang-format on

namespace jaxlowprec {

#define JLP_DECLARE(name) extern "C" XLA_FFI_Error* jaxlowprec_##name(XLA_FFI_CallFrame*);
JLP_HANDLERS(JLP_DECLARE)
JLP_CPU_HANDLERS(JLP_DECLARE)
#undef JLP_DECLARE

#if defined(JLP_CUDA)
#define JLP_DECLARE(name) extern "C" XLA_FFI_Error* jaxlowprec_##name##_cuda(XLA_FFI_CallFrame*);
JLP_HANDLERS(JLP_DECLARE)
#undef JLP_DECLARE
extern "C" XLA_FFI_Error* jaxlowprec_scaled_matmul_cuda_prepare(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* jaxlowprec_scaled_matmul_cuda_initialize(XLA_FFI_CallFrame*);
#endif

}  // namespace jaxlowprec
