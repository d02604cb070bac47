// What quantisation did to an array, counted on the GPU.
#pragma once

#include "../launch.h"
#include "parts.h"

namespace jaxlowprec {
namespace cuda {

// The problems' results are those of whole matrices here: [batch, 2], [batch, columns] and [batch, kSums]. The workspace is
// aligned for doubles.
cudaError_t launch(const MomentsProblem& problem, void* workspace, cudaStream_t stream);
cudaError_t launch(const OutliersProblem& problem, cudaStream_t stream);
cudaError_t launch(const SumsProblem& problem, void* workspace, cudaStream_t stream);

/// The vectors of tensors, of formats with these scalings by turns.
struct VectorsProblem {
  int64_t tensors;
  const float *sums, *amax, *rms, *outliers, *channels;
  const Scaling* scalings;  // [formats], in the host's memory
  int64_t formats;
  float* result;  // [tensors, kVector]
};
cudaError_t launch(const VectorsProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
