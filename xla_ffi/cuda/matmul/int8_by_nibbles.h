// The GEMM of 8-bit integers by rows with a 4-bit weight in groups, Int4 or MXFP4 (numerics.md 18): W4A8.
#pragma once

#include "../launch.h"

namespace jaxlowprec {
namespace cuda {

/// y = 0; for each group in order y = fma(its exact sum, the scale of its row of b, y); result = fl(y * the scale of a's
/// row)
/// + accumulate, rounded once to its type. A row of the result depends on no other row, nor on how many there are.
struct Int8ByNibblesProblem {
  const uint8_t* a;        // [rows, depth]
  const float* a_scale;    // [rows]
  Format b_format;         // Int4 in groups of 32, 64, 128 or 256, with scales in bfloat16 or float16; or MXFP4 in 1x32
  const uint8_t* b;        // [columns, b_format.row_bytes(depth)]
  const uint8_t* b_scale;  // [groups, columns]
  int64_t rows, columns, depth;  // M, N, K; N and K multiples of 16. All pointers are of 16 bytes
  const void* accumulate;        // [rows, columns] of the result's type; null: none
  void* result;                  // [rows, columns]
  ElementType type;              // bfloat16 or float32
};

cudaError_t launch(const Int8ByNibblesProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
