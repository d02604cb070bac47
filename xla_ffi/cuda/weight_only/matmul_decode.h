// The GEMM of few rows by a weight of 4 bits, decoded in registers: inference is bound by the weight's bytes.
#pragma once

#include "../launch.h"

namespace jaxlowprec {
namespace cuda {

// --- Few rows of activations by a quantised weight on the GPU.

/// alpha * x w^T: no bias, no activation, nothing accumulated; `weight.amax` is alpha.
cudaError_t launch(const WeightOnlyProblem& problem, uint8_t* workspace, int64_t workspace_bytes, cudaStream_t stream);

enum class WeightType : int32_t {
  kNvfp4,  // E2M1 codes, an E4M3 scale per 16 or per 16x16 (numerics.md 2); the amax belongs to alpha
  kInt4,   // unsigned codes, low nibble first; a weight is bf16((code - zero point) * scale) (numerics.md 8)
};

struct DecodedWeight {
  WeightType type;
  const uint8_t* data;        // [columns, row_bytes]: contraction last
  const void* scale;          // E4M3 or bfloat16, [columns (tiles: columns / 16, rounded up), groups of the row]
  const uint8_t* zero_point;  // of kInt4: [columns, groups]; null: 8, codes being offset binary
  int32_t group;              // elements that share a scale: 16 for kNvfp4, any multiple of 32 for kInt4
  bool tiles;                 // kNvfp4: 16x16
};

/// result[m, n] = alpha * sum over k of x[m, k] * w[n, k], accumulated in float32, rounded once to the result's type.
/// Sums below 2^-118 count as zero. A row of the result depends on no other row, nor on how many there are.
struct MatmulDecodeProblem {
  MatmulOperand x;     // NVFP4 codes [rows, ...]; data null: x_bf16 is given instead
  const void* x_bf16;  // [rows, depth]
  DecodedWeight w;     // rows of whole groups: ceil(depth / group) * group codes, those beyond depth with finite scales
  const float* alpha;  // on the device; null: 1
  int64_t rows, columns, depth;  // M, N, K. Any M: 16 rows are done at a time
  void* result;                  // [rows, columns]
  ElementType type;
  void* workspace;  // matmul_decode_workspace_bytes(problem), 16-byte aligned
};

int64_t matmul_decode_workspace_bytes(const MatmulDecodeProblem& problem);
cudaError_t launch(const MatmulDecodeProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
