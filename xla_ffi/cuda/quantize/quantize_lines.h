// Quantisation by lines that have a scale each: the definitions are in a source file for each, which compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

/// Only along rows; their amaxes are found where they are not given.
cudaError_t launch_line_rows(const QuantizeProblem& problem, cudaStream_t stream);

/// Along columns, or both ways; the amaxes of all lines are given.
cudaError_t launch_line_tiles(const QuantizeProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
