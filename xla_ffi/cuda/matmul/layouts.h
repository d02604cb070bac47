// The scales of an operand as cuBLASLt's block-scaled GEMMs read them: what jaxlowprec.layouts.gemm_scales describes.
#pragma once

#include "../launch.h"
#include "gemm.h"

namespace jaxlowprec {
namespace cuda {

/// kTwoLevel, kE8M0: the 128x4 swizzle of numerics.md 6; scales of square tiles are repeated for each row.
/// kFloat32 1x128: VEC128_32F, [ceil(columns / 128), rows rounded up to 4].
/// kFloat32 128x128: BLK128x128_32F, [ceil(rows / 128), ceil(columns / 128) rounded up to 4].
/// Padding is zero. kTensor and kRows have only one layout and are refused.
struct ScaleLayoutProblem {
  Format format;
  const uint8_t* scale;          // [batch, format.scales(rows, columns)], logical
  int64_t batch, rows, columns;  // of the operand's elements, contraction last
  void* result;                  // [batch, gemm_scale_bytes(format, rows, columns)], 16-byte aligned
};

cudaError_t launch(const ScaleLayoutProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
