// Sums of a GEMM times the scales of both operands' lines (numerics.md 18).
#pragma once

#include "../launch.h"

namespace jaxlowprec {
namespace cuda {

/// result = fl(fl(sum * of_columns) * of_rows) + accumulate, rounded once to its type. Columns are a multiple of 4, pointers
/// of 16 bytes.
struct LineScalesProblem {
  const void* sums;  // [rows, columns]: int32 if `integers`, else float32
  bool integers;
  int64_t rows, columns;
  const float *of_rows, *of_columns;
  const void* accumulate;  // [rows, columns] of the result's type; null: none
  void* result;            // [rows, columns]
  ElementType type;
};

cudaError_t launch(const LineScalesProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
