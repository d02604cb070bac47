// Block scales in the orders that cuBLASLt reads (gemm.h; the layouts of jaxlowprec/layouts.py).
#pragma once

#include "gemm.h"
#include "launch.h"

namespace jaxlowprec {
namespace cuda {

/// Logical scales [format.scale_rows(rows), format.scale_columns(depth)] -> `order`. Those of tiles are repeated for each row
/// where the order has one a row. kE8M0x32 takes float32 scales too: powers of two (their exponents, NaN stays one), each
/// repeated for the four blocks of 32. What an order pads is zero.
struct ScaleLayoutProblem {
  Format format;
  const uint8_t* scale;
  int64_t rows, depth;
  GemmScaling order;
  uint8_t* result;  // [gemm_scale_bytes(order, rows, depth)], 16-byte aligned
};

cudaError_t launch(const ScaleLayoutProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
