// What quantisation did to an array, counted on the GPU.
#pragma once

#include "../launch.h"

namespace jaxlowprec {
namespace cuda {

/// A problem is cut into parts by its shape alone, so that sums are added in the same order on every GPU: about so many in
/// all matrices together, which is several blocks for each multiprocessor of the largest GPU.
constexpr int64_t kStatisticsParts = 1024;

/// How many parts each matrix of a batch has; `most` is as many as there are pieces of it.
inline int64_t parts_of_matrix(int64_t batch, int64_t most) {
  const int64_t parts = (kStatisticsParts + batch - 1) / batch;
  return parts < most ? parts : most;
}

/// What a part found, in the workspace.
struct MomentsOfPart {
  double energy;
  uint32_t largest, unused;
};
struct SumsOfPart {
  double sums[kSums];  // counts are exact to 2^53
};

/// Bytes of workspace for any matrices of a batch: a part more for each matrix, for rounding up.
template <class Part>
constexpr int64_t workspace_for(int64_t batch) {
  return (kStatisticsParts + batch) * static_cast<int64_t>(sizeof(Part));
}

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
