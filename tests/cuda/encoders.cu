// Every number of an array quantised by itself: what tests/cuda/encoders_test.cc compares with the rules.
#include "../../xla_ffi/cuda/quantize_codes.cuh"
#include "encoders.h"

namespace jaxlowprec {
namespace cuda {
namespace {

/// Groups of 16 elements that are multiplied by one factor, with one word of random bits for every four.
template <class E, class Code, bool kStochastic>
__global__ void encode_groups(const uint32_t* words, int64_t groups, float factor, uint32_t random_word, uint8_t* codes) {
  constexpr int kWords = kCodeWords<Code>;
  for (int64_t g = blockIdx.x * blockDim.x + threadIdx.x; g < groups; g += gridDim.x * blockDim.x) {
    Group<E> group;
    for (int i = 0; i < Group<E>::kWords; ++i) group.words[i] = words[g * Group<E>::kWords + i];
    const uint32_t random[4] = {random_word, random_word, random_word, random_word};
    uint32_t found[kWords];
    const bool below_7 = as_float(magnitude_bits<E>(group.words)) * factor < 7.0f;
    encode_group<Code, kStochastic>(group, factor, below_7, random, found);
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(codes)[g * kWords + i] = found[i];
  }
}

template <class E, class Code>
cudaError_t launch(const EncodeProblem& p) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(4), config.blockDim = dim3(64);
  const auto kernel = p.stochastic ? encode_groups<E, Code, true> : encode_groups<E, Code, false>;
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
