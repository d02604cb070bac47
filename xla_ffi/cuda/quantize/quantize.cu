#include "../launch.h"
#include "quantize.h"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const QuantizeProblem& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0 || (!p.rowwise.data && !p.columnwise.data)) return cudaSuccess;
  if (!random_fits(p)) return cudaErrorInvalidValue;
  if (p.format.scaling == Scaling::kTwoLevel) return quantize_codes<E2M1, true>(p, stream);
  return with_float(p.format.code, [&](auto code) { return quantize_codes<decltype(code), false>(p, stream); });
}

}  // namespace cuda
}  // namespace jaxlowprec
