// Quantisation by type of code. The definition is quantize_launch.cuh's; each instantiation is compiled in a source file of
// its own, which CMakeLists.txt writes from quantize_codes.cu.in, so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

/// Whether the indices of random numbers fit: kernels count them in 32 bits.
inline bool random_fits(const QuantizeProblem& p) {
  for (const Random& random : {p.rowwise.random, p.columnwise.random})
    if (p.batch * random.rows_step > UINT32_MAX || p.batch * random.sixteens_step > UINT32_MAX) return false;
  return true;
}

/// How blocks get their scales: as the problem's format says, which is not NVFP4's; or NVFP4's, as it is (also with the room
/// above that eden needs) or the best of several by an error.
enum class Scales : int32_t { kOne, kTwoLevel, kTwoLevelWithRoom, kBestAbsolute, kBestSquared, kBestRelativeSquared };
template <Scales kScales>
constexpr bool kIsTwoLevel = kScales != Scales::kOne;
template <Scales kScales>
constexpr bool kIsChosen =
    kScales == Scales::kBestAbsolute || kScales == Scales::kBestSquared || kScales == Scales::kBestRelativeSquared;
/// Whether random bits are for scales (numerics.md 14); else they are for codes.
template <Scales kScales, bool kStochastic>
constexpr bool kEden = kStochastic && (kIsChosen<kScales> || kScales == Scales::kTwoLevelWithRoom);
inline Scales scales_of(const Format& format, bool eden) {
  if (format.scaling != Scaling::kTwoLevel) return Scales::kOne;
  return format.scale_rule == ScaleRule::kFourOverSix      ? Scales::kBestAbsolute
         : format.scale_rule == ScaleRule::kFourOverSixMse ? Scales::kBestSquared
         : format.scale_rule == ScaleRule::kSearch         ? Scales::kBestRelativeSquared
         : eden                                            ? Scales::kTwoLevelWithRoom
                                                           : Scales::kTwoLevel;
}

template <class Code, Scales kScales>
cudaError_t quantize_codes(const QuantizeProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
