// A GEMM's MXFP4 operand as E4M3: with a float32 scale for 128 elements of a row, as Hopper's FP8 tensor cores take them
// (numerics.md 9.3), or with its own scales, as Blackwell's do.
#pragma once

#include "../launch.h"
#include "gemm.h"

namespace jaxlowprec {
namespace cuda {

/// Of 128 elements: the scale is s / 64 for the largest block scale s among their blocks that are not all zero, and at
/// least 2^-126, so that no arithmetic flushes it. An element is rounded to E4M3 times that, to nearest even. It is exact
/// unless its own block's scale is below 2^-14 s; then it is off by 2^-16 s at most. A block scale that is NaN makes the
/// scale NaN. The elements are the numbers that codes and scales stand for, also below 2^-126 and from 2^128 on, where
/// decode.h has zero and infinity.
struct RebaseProblem {
  MatmulOperand operand;
  int64_t rows;
  uint8_t* codes;  // [rows, rebased_width(operand.columns)], 16-byte aligned; what lies beyond the columns is zero
  float* scales;   // [rebased_width(operand.columns) / 128, rows]: VEC128_32F where rows are a multiple of 4
};

cudaError_t launch(const RebaseProblem& problem, cudaStream_t stream);

/// The same operand as E4M3 in blocks of 32, whose scales it keeps: every E2M1 number is one of E4M3. Blackwell's FP8 tensor
/// cores take it (numerics.md 6).
struct WidenProblem {
  MatmulOperand operand;
  int64_t rows;
  uint8_t* codes;  // [rows, operand.columns], 16-byte aligned
};

cudaError_t launch(const WidenProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
