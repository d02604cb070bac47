#include "../launch.h"
#include "quantize.h"
#include "quantize_lines.h"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const QuantizeProblem& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0 || (!p.rowwise.data && !p.columnwise.data)) return cudaSuccess;
  if (!random_fits(p)) return cudaErrorInvalidValue;
  if (p.format.scaling == Scaling::kRows)
    return p.columnwise.data ? launch_line_tiles(p, stream) : launch_line_rows(p, stream);
  switch (scales_of(p.format, p.eden)) {
    case Scales::kTwoLevel: return quantize_codes<E2M1, Scales::kTwoLevel>(p, stream);
    case Scales::kTwoLevelWithRoom: return quantize_codes<E2M1, Scales::kTwoLevelWithRoom>(p, stream);
    case Scales::kBestAbsolute: return quantize_codes<E2M1, Scales::kBestAbsolute>(p, stream);
    case Scales::kBestSquared: return quantize_codes<E2M1, Scales::kBestSquared>(p, stream);
    case Scales::kBestRelativeSquared: return quantize_codes<E2M1, Scales::kBestRelativeSquared>(p, stream);
    default:
      return with_float(p.format.code, [&](auto code) { return quantize_codes<decltype(code), Scales::kOne>(p, stream); });
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
