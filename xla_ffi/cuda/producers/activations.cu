#include "activations.cuh"
#include "result_amaxes.h"

namespace jaxlowprec {
namespace cuda {
namespace {

struct NoShared {};

template <ElementType kType, class Rule>
cudaError_t launch_rule(ActivationArguments<Rule> a, cudaStream_t stream) {
  const int64_t tile = int64_t{kActivationThreads} * kActivationPieces * Piece<kType, true>::kCount;
  if (!cut(1, 1, divide_up(a.size, tile), a.tiles)) return cudaErrorInvalidValue;
  a.aligned = true;
  for (const void* operand : a.operands) a.aligned = a.aligned && aligned(operand, 16);
  for (const void* result : a.results) a.aligned = a.aligned && aligned(result, 16);
  return launch_over_tiles<activation_kernel<kType, Rule>, NoShared>(kActivationThreads, a, stream);
}

/// Calls visit with the element type, the rule and whether it is gated, as constants.
template <class Problem, class Visit>
cudaError_t with_activation(const Problem& p, Visit visit) {
  if (p.batch * p.size == 0) return cudaSuccess;
  return with_type(p.type, [&](auto type) {
    return with_rule(p.kind, [&](auto rule) {
      return p.up ? visit(type, rule, std::true_type()) : visit(type, rule, std::false_type());
    });
  });
}

}  // namespace

cudaError_t launch(const ActivationProblem& p, cudaStream_t stream) {
  const cudaError_t error = with_activation(p, [&](auto type, auto rule, auto gated) {
    ActivationArguments<Activate<decltype(rule), gated>> a{};
    a.size = p.batch * p.size, a.operands[0] = p.x, a.results[0] = p.result;
    if constexpr (gated) a.operands[1] = p.up;
    return launch_rule<type>(a, stream);
  });
  if (error != cudaSuccess) return error;
  return launch_amaxes(p.amaxes, p.result, p.type, p.batch, p.size, p.columns, stream);
}

cudaError_t launch(const ActivationGradientProblem& p, cudaStream_t stream) {
  cudaError_t error = with_activation(p, [&](auto type, auto rule, auto gated) {
    ActivationArguments<ActivateBackward<decltype(rule), gated>> a{};
    a.size = p.batch * p.size, a.operands[0] = p.dy, a.operands[1] = p.x, a.results[0] = p.dx;
    if constexpr (gated) a.operands[2] = p.up, a.results[1] = p.dup;
    return launch_rule<type>(a, stream);
  });
  if (error == cudaSuccess) error = launch_amaxes(p.of_dx, p.dx, p.type, p.batch, p.size, p.columns, stream);
  if (error == cudaSuccess) error = launch_amaxes(p.of_dup, p.dup, p.type, p.batch, p.size, p.columns, stream);
  return error;
}

}  // namespace cuda
}  // namespace jaxlowprec
