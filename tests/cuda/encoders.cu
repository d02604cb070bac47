// Every number of an array quantised by itself: what tests/cuda/encoders_test.cc compares with the rules.
#include "../../xla_ffi/cuda/quantize/quantize_codes.cuh"
#include "encoders.h"

namespace jaxlowprec {
namespace cuda {
namespace {

/// Sixteens of elements that are multiplied by one factor, with one word of random bits for every four.
template <class E, class Code, bool kStochastic>
__global__ void encode_sixteens(const uint32_t* words, int64_t sixteens, float factor, uint32_t random_word,
                                uint8_t* codes) {
  constexpr int kWords = kCodeWords<Code>;
  for (int64_t g = blockIdx.x * blockDim.x + threadIdx.x; g < sixteens; g += gridDim.x * blockDim.x) {
    Sixteen<E> sixteen;
    for (int i = 0; i < Sixteen<E>::kWords; ++i) sixteen.words[i] = words[g * Sixteen<E>::kWords + i];
    const uint32_t random[4] = {random_word, random_word, random_word, random_word};
    uint32_t found[kWords];
    const bool below_7 = as_float(magnitude_bits<E>(sixteen.words)) * factor < 7.0f;
    encode_sixteen<Code, kStochastic>(sixteen, factor, below_7, random, found);
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(codes)[g * kWords + i] = found[i];
  }
}

template <class E, class Code>
cudaError_t launch(const EncodeProblem& p) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(4), config.blockDim = dim3(64);
  const auto kernel = p.stochastic ? encode_sixteens<E, Code, true> : encode_sixteens<E, Code, false>;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const uint32_t*>(p.x), p.count / 16, p.factor, p.random_word,
                            p.codes);
}

}  // namespace

cudaError_t encode(const EncodeProblem& p) {
  return with_element(p.type, [&](auto element) {
    using E = decltype(element);
    return with_float(p.code, [&](auto code) { return launch<E, decltype(code)>(p); });
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
