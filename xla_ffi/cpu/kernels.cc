// The table of the kernels of one instruction set.
#include "kernels.h"

#include "entry.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

bool is_nvfp4(const QuantizeProblem& p) { return p.format.scaling == Scaling::kTwoLevel; }

int64_t quantize_chunks(const QuantizeProblem& p) {
  return is_nvfp4(p) ? quantize_nvfp4_chunks(p) : quantize_blocks_chunks(p);
}

void quantize_chunk(const QuantizeProblem& p, int64_t chunk) {
  return is_nvfp4(p) ? quantize_nvfp4_chunk(p, chunk) : quantize_blocks_chunk(p, chunk);
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
#if defined(JLP_ISA_AVX512)
    "avx512",
#elif defined(JLP_ISA_AVX2)
    "avx2",
#else
    "portable",
#endif
    amax_chunks,
    amax_chunk,
    quantize_chunks,
    quantize_chunk,
    dequantize_chunks,
    dequantize_chunk,
    hadamard_chunks,
    hadamard_chunk,
    matmul_chunks,
    matmul_chunk,
    weight_only_chunks,
    weight_only_chunk,
    int4_fake_quantize_chunks,
    int4_fake_quantize_chunk,
    int4_quantize_chunks,
    int4_quantize_chunk,
    int4_dequantize_chunks,
    int4_dequantize_chunk,
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
