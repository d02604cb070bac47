// Replacements of the launches of xla_ffi/cuda/matmul/matmul.cc other than cuBLASLt: the same results by plain loops in the
// host's memory, and a device whose compute capability a test chooses. The kernels themselves have tests of their own.
#pragma once

namespace doubles {

inline int capability = 90;                // 9.0
inline int device = 0;                     // the current one
inline int small_calls = 0;                // of the GEMM of few rows
inline int layout_calls = 0;               // that bring scales into order
inline float (*milliseconds)() = nullptr;  // the time of the device

}  // namespace doubles
