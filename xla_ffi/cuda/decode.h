// A GEMM's operand as bfloat16 without its tensor scale, for tensor cores that do not know its format (numerics.md 9).
#pragma once

#include "launch.h"

namespace jaxlowprec {
namespace cuda {

/// What each format's decoded element is
/// * kTwoLevel: E2M1 times its E4M3 scale, exact. The amaxes belong to the GEMM's alpha.
/// * kE8M0, and kFloat32 with powers of two: the number that the code stands for, as `dequantize` gives it in bfloat16, and
///   exact but for what float32 itself does not hold: a magnitude of 2^128 or more is infinite, one below 2^-126 counts as
///   zero (numerics.md, Notation). bfloat16 has float32's exponents, so it loses nothing more. No scale is folded into the
///   GEMM's alpha instead: blocks differ, and a product of two scales that float32 holds although one of its factors does
///   not is not the product of the decoded operands, which is what numerics.md 9 defines.
/// * kTensor: the code alone, exact. The scale belongs to alpha.
/// * kRows: the same. The scales are applied to sums.
/// A poisoned block is NaN throughout. kFloat32 with other scales than powers of two has no exact bfloat16 and is refused.
struct DecodeProblem {
  MatmulOperand operand;
  int64_t batch, rows;
  int64_t depth;  // K: how many elements of each row are decoded, at most operand.columns
  int64_t width;  // of a row of the result, at least depth; what lies beyond depth is written as zero
  void* result;   // [batch, rows, width] bfloat16; 16-byte accesses where width is a multiple of 8
};

bool decode_supports(const Format& format);
cudaError_t launch(const DecodeProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
