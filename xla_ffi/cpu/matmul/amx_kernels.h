// The kernels of another set of AVX-512 with GEMMs of 8-bit integers by AMX. Their results are the same: sums are exact.
// They may only be called where the processor has AMX and the system has given this process its tiles (processor.h).
#pragma once

#include "../kernels.h"

namespace jaxlowprec {
namespace avx512_amx {

Kernels kernels(const Kernels& others);

}  // namespace avx512_amx
}  // namespace jaxlowprec
