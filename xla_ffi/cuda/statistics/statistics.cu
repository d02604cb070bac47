#include <algorithm>

#include "../launch_blocks.h"
#include "finish.cuh"
#include "moments.cuh"
#include "outliers.cuh"
#include "statistics.h"

namespace jaxlowprec {
namespace cuda {
cudaError_t launch(const MomentsProblem& p, void* workspace, cudaStream_t stream) {
  if (p.batch == 0 || p.size == 0) return cudaSuccess;
  const int64_t tile = int64_t{kMomentsThreads} * kMomentsPieces * 16 / element_bytes(p.type);
  const uint32_t parts = static_cast<uint32_t>(parts_of_matrix(p.batch, divide_up(p.size, tile)));
  const MomentsArguments a{p.x, p.size, static_cast<MomentsOfPart*>(workspace), p.result, parts};
  const cudaError_t error = with_type(p.type, [&](auto type) {
    return launch_blocks(moments_kernel<type>, {p.batch * parts, 1, 1, kMomentsThreads, sizeof(MomentsShared)}, stream, a);
  });
  if (error != cudaSuccess) return error;
  return launch_blocks(moments_sum_kernel, {p.batch, 1, 1, kMomentsThreads, sizeof(MomentsShared)}, stream, a);
}

cudaError_t launch(const OutliersProblem& p, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(p.result, 0, p.batch * p.columns * sizeof *p.result, stream);
  if (error != cudaSuccess || p.batch == 0 || p.rows == 0 || p.columns == 0) return error;
  const int64_t down = divide_up(p.rows, kOutlierTile), across = divide_up(p.columns, kOutlierTile);
  if (down * across * p.batch > INT32_MAX) return cudaErrorInvalidValue;
  const OutliersArguments a{p.x,
                            p.threshold,
                            p.result,
                            p.rows,
                            p.columns,
                            static_cast<uint32_t>(down),
                            static_cast<uint32_t>(across),
                            aligned(p.x, 16) && p.columns % 8 == 0};
  return with_type(p.type, [&](auto type) {
    return launch_blocks(outliers_kernel<type>, {down * across * p.batch, 1, 1, kOutlierThreads, sizeof(OutliersShared)},
                         stream, a);
  });
}

cudaError_t launch(const VectorsProblem& p, cudaStream_t stream) {
  VectorsArguments a{p.sums, p.amax, p.rms, p.outliers, p.channels, p.result, p.formats, 0, 0, {}};
  for (int64_t first = 0; first < p.formats && p.tensors > 0; first += kVectorFormats) {
    a.first = static_cast<int32_t>(first);
    a.count = static_cast<int32_t>(std::min<int64_t>(kVectorFormats, p.formats - first));
    for (int i = 0; i < a.count; ++i) a.scalings[i] = static_cast<uint8_t>(p.scalings[first + i]);
    const cudaError_t error = launch_blocks(
        vectors_kernel, {p.tensors / p.formats * a.count, 1, 1, kVectorThreads, sizeof(VectorsShared)}, stream, a);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxlowprec
