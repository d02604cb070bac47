// The table of the kernels of one instruction set.
#include "kernels.h"

#include "entry.h"

namespace jaxlowprec {
namespace JLP_ISA {

int64_t quantize_chunks(const QuantizeProblem& p) {
  switch (p.format.scaling) {
    case Scaling::kTwoLevel: return quantize_nvfp4_chunks(p);
    case Scaling::kRows: return quantize_lines_chunks(p);
    default: return quantize_blocks_chunks(p);
  }
}

void quantize_chunk(const QuantizeProblem& p, int64_t chunk) {
  switch (p.format.scaling) {
    case Scaling::kTwoLevel: return quantize_nvfp4_chunk(p, chunk);
    case Scaling::kRows: return quantize_lines_chunk(p, chunk);
    default: return quantize_blocks_chunk(p, chunk);
  }
}

extern const Kernels kernels;
const Kernels kernels = {
#if defined(JLP_ISA_AVX512)
    "avx512",
#elif defined(JLP_ISA_AVX2)
    "avx2",
#else
    "portable",
#endif
#define JLP_ENTRIES(name, Problem) name##_chunks, name##_chunk,
    JLP_OPERATIONS(JLP_ENTRIES)
#undef JLP_ENTRIES
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
