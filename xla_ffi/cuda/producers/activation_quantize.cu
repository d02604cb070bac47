#include "activation_quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const ActivationQuantizeProblem& p, cudaStream_t stream) {
  return with_element_and_code(p.quantize, [&](auto element, auto code) {
    using E = decltype(element);
    using Code = decltype(code);
    const MadeOf<1> made{&p.quantize, {p.x, p.up}, p.kind, p.up ? Makes::kGated : Makes::kPlain};
    if (p.quantize.stochastic()) return launch_made<quantize_activation_tiles<E, Code, true>, E, Code, true>(made, stream);
    if (const int found = pow2_block_of<E, Code>(made))
      return with_pow2_block<Code>(found, [&](auto block) {
        return launch_pow2_made<quantize_activation_pow2_tiles<Code, block>, Code>(made, stream);
      });
    return launch_made<quantize_activation_tiles<E, Code, false>, E, Code, false>(made, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
