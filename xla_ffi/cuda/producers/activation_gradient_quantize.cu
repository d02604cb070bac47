#include "activation_quantize_launch.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

template <class E, class Code, int kResults>
cudaError_t launch_gradients(const MadeOf<kResults>& made, cudaStream_t stream) {
  if (const int found = pow2_block_of<E, Code>(made))
    return with_pow2_block<Code>(found, [&](auto block) {
      return launch_pow2_made<quantize_gradient_pow2_tiles<Code, block, kResults>, Code>(made, stream);
    });
  return launch_made<quantize_gradient_tiles<E, Code, kResults>, E, Code, false>(made, stream);
}

}  // namespace

cudaError_t launch(const ActivationGradientQuantizeProblem& p, cudaStream_t stream) {
  return with_element_and_code(p.quantize[0], [&](auto element, auto code) {
    using E = decltype(element);
    using Code = decltype(code);
    const QuantizeProblem *of_x = &p.quantize[0], *of_up = &p.quantize[1];
    if (!p.up) return launch_gradients<E, Code, 1>({of_x, {p.dy, p.x}, p.kind, Makes::kGradient}, stream);
    if constexpr (E::kBytes == 2) {
      return launch_gradients<E, Code, 2>({of_x, {p.dy, p.x, p.up}, p.kind, Makes::kGradientsOfBoth}, stream);
    } else {
      const MadeOf<1> gate{of_x, {p.dy, p.x, p.up}, p.kind, Makes::kGradientOfGate};
      const cudaError_t error = launch_gradients<E, Code, 1>(gate, stream);
      if (error != cudaSuccess) return error;
      return launch_gradients<E, Code, 1>({of_up, {p.dy, p.x}, p.kind, Makes::kGradientOfUp}, stream);
    }
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
