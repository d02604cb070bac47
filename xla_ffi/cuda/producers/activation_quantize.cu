#include "activation_quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const ActivationQuantizeProblem& p, cudaStream_t stream) {
  return with_element_and_code(p.quantize, [&](auto element, auto code) {
    using E = decltype(element);
    using Code = decltype(code);
    const MadeOf<1> made{&p.quantize, {p.x, p.up}, p.kind, p.up ? Makes::kGated : Makes::kPlain};
    return p.quantize.stochastic() ? launch_made<quantize_activation_tiles<E, Code, true>, E, Code, true>(made, stream)
                                   : launch_made<quantize_activation_tiles<E, Code, false>, E, Code, false>(made, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
