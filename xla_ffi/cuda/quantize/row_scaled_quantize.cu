#include "../launch.h"
#include "quantize_launch.cuh"
#include "row_scaled_quantize.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

template <Scales kScales>
cudaError_t launch_row_scaled(const RowScaledQuantizeProblem& p, cudaStream_t stream) {
  QuantizeProblem rows{};
  rows.x = p.x, rows.rows = p.batch * p.rows, rows.columns = p.columns, rows.format = p.format;
  rows.rowwise.data = p.data, rows.rowwise.scale = p.scale;
  const int threads = p.columns > kRowThreads / 2 * 16 * kRowScaledHeld<kScales> ? kRowThreads : kRowThreads / 2;
  const Blocks blocks{rows.rows, 1, 1, threads, sizeof(RowScaledShared)};
  return with_element(p.type, [&](auto element) {
    using E = decltype(element);
    const QuantizeArguments a = quantize_arguments<E, E2M1>(rows);
    return launch_blocks(row_scaled_quantize<E, kScales>, blocks, stream,
                         RowScaledArguments{a, p.amax, a.pieces && p.columns % 16 == 0});
  });
}

}  // namespace

cudaError_t launch(const RowScaledQuantizeProblem& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  switch (scales_of(p.format, false)) {
    case Scales::kTwoLevel: return launch_row_scaled<Scales::kTwoLevel>(p, stream);
    case Scales::kBestAbsolute: return launch_row_scaled<Scales::kBestAbsolute>(p, stream);
    case Scales::kBestSquared: return launch_row_scaled<Scales::kBestSquared>(p, stream);
    case Scales::kBestRelativeSquared: return launch_row_scaled<Scales::kBestRelativeSquared>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
