// The engine that a handler runs on: XLA's thread pool for CPU kernels, a stream for GPU kernels. A handler is a template
// over it, so that buffers and attributes are decoded and checked once for both.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../cpu/run.h"
#include "buffers.h"

#if defined(JLP_CUDA)
#include "../cuda/errors.h"
#include "../cuda/launch.h"
#endif

namespace jaxlowprec {

// --- Asks for large pages behind a large result.
//
// XLA gives a handler fresh memory for its results, and the first write to each 4 KiB of it is a page fault: on a virtual
// machine 32 MiB of them took 20 ms, where writing takes 4. With 2 MiB pages it is one fault for 512 of those.

/// A hint: it changes no contents, and a system that grants no large pages ignores it.
inline void ask_for_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kPage - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

template <class Engine>
constexpr bool kOnGpu = !std::is_same_v<Engine, ffi::ThreadPool>;

// --- the CPU

/// A result's memory, about to be written.
inline void* written(ffi::ThreadPool&, ffi::AnyBuffer& buffer) {
  ask_for_large_pages(buffer.untyped_data(), buffer.size_bytes());
  return buffer.untyped_data();
}

/// Zeroes the amaxes that the CPU's kernels raise. The GPU's launch zeroes them itself.
inline void clear(ffi::ThreadPool&, uint32_t* bits, int64_t count) { std::memset(bits, 0, count * sizeof *bits); }

template <class Problem>
ffi::Error run_on(ffi::ThreadPool& pool, const char*, const Problem& problem) {
  run(pool, problem);
  return ffi::Error::Success();
}

#define JLP_DEFINE_CPU_HANDLER(operation, function, operands) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_##operation, function, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() operands)

// --- the GPU

#if defined(JLP_CUDA)

inline void* written(cudaStream_t, ffi::AnyBuffer& buffer) { return buffer.untyped_data(); }
inline void clear(cudaStream_t, uint32_t*, int64_t) {}

template <class Problem>
ffi::Error run_on(cudaStream_t stream, const char* operation, const Problem& problem) {
  const cudaError_t status = cuda::launch(problem, stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(cuda::failure(operation, problem, cuda::reason(status)));
}

// Nothing here waits, allocates or reads the device's memory: every call can be captured in a graph.
#define JLP_DEFINE_CUDA_HANDLER(operation, function, operands)                                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_##operation##_cuda, function,                            \
                                ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>() operands, \
                                {ffi::Traits::kCmdBufferCompatible})
#else
#define JLP_DEFINE_CUDA_HANDLER(operation, function, operands) static_assert(true, "built without CUDA")
#endif

/// Handlers jaxlowprec_<operation> and jaxlowprec_<operation>_cuda of the template `operation`, with the same operands.
#define JLP_DEFINE_HANDLERS(operation, operands)                           \
  JLP_DEFINE_CPU_HANDLER(operation, operation<ffi::ThreadPool>, operands); \
  JLP_DEFINE_CUDA_HANDLER(operation, operation<cudaStream_t>, operands)

}  // namespace jaxlowprec
