// How the statistics of matrices are cut into parts, and the workspace that they take: known when a program is compiled.
#pragma once

#include <cstdint>

#include "../../problems.h"

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

}  // namespace cuda
}  // namespace jaxlowprec
