#include <algorithm>

#include "../launch.h"
#include "activation_amaxes.cuh"
#include "result_amaxes.h"

namespace jaxlowprec {
namespace cuda {
namespace {

struct NoShared {};

/// What both kernels take: the arrays, of `size` elements a matrix.
template <class Rule>
struct Arrays {
  const void* operands[Rule::kOperands];
  void* results[Rule::kResults];
  ResultAmaxes amaxes[Rule::kResults];
  int64_t batch, size, columns;
  float* sums;  // see ActivationGradientProblem

  bool all_aligned(uint32_t bytes) const {
    bool found = true;
    for (const void* operand : operands) found = found && aligned(operand, bytes);
    for (const void* result : results) found = found && aligned(result, bytes);
    return found;
  }
};

template <ElementType kType, class Rule>
cudaError_t launch_plain(const Arrays<Rule>& arrays, cudaStream_t stream) {
  ActivationArguments<Rule> a{};
  a.size = arrays.batch * arrays.size;
  const int64_t tile = int64_t{kActivationThreads} * kActivationPieces * Piece<kType, true>::kCount;
  if (!cut(1, 1, divide_up(a.size, tile), a.tiles)) return cudaErrorInvalidValue;
  std::copy_n(arrays.operands, Rule::kOperands, a.operands), std::copy_n(arrays.results, Rule::kResults, a.results);
  a.aligned = arrays.all_aligned(16);
  return launch_over_tiles<activation_kernel<kType, Rule>, NoShared>(kActivationThreads, a, stream);
}

template <ElementType kType, class Rule>
cudaError_t launch_amaxed(const Arrays<Rule>& arrays, cudaStream_t stream) {
  AmaxedArguments<Rule> a{};
  a.rows = arrays.size / arrays.columns, a.columns = arrays.columns;
  if (!cut(arrays.batch, divide_up(a.rows, kRotatedRows), divide_up(a.columns, kTile), a.tiles))
    return cudaErrorInvalidValue;
  std::copy_n(arrays.operands, Rule::kOperands, a.operands), std::copy_n(arrays.results, Rule::kResults, a.results);
  a.pairs = arrays.all_aligned(2 * kElementBytes<kType>) && a.columns % 2 == 0;
  for (int j = 0; j < Rule::kResults; ++j) {
    a.plain[j] = arrays.amaxes[j].plain, a.rotated[j] = arrays.amaxes[j].rotated;
    a.sign_mask |= arrays.amaxes[j].sign_mask;
  }
  a.sums = arrays.sums;
  return launch_over_tiles<amaxed_activation_kernel<kType, Rule>, AmaxedShared<kType, Rule>>(kAmaxThreads, a, stream);
}

/// Clears the amaxes, and launches the kernel that takes them where one is wanted, or sums.
template <ElementType kType, class Rule>
cudaError_t launch_rule(const Arrays<Rule>& arrays, cudaStream_t stream) {
  bool wanted = arrays.sums != nullptr;
  for (const ResultAmaxes& amaxes : arrays.amaxes) {
    wanted = wanted || amaxes.wanted();
    const cudaError_t error = clear_amaxes(amaxes, arrays.batch, stream);
    if (error != cudaSuccess) return error;
  }
  if (arrays.batch * arrays.size == 0) return cudaSuccess;
  return wanted ? launch_amaxed<kType>(arrays, stream) : launch_plain<kType>(arrays, stream);
}

/// Calls visit with the element type, the rule and whether it is gated, as constants.
template <class Problem, class Visit>
cudaError_t with_activation(const Problem& p, Visit visit) {
  return with_type(p.type, [&](auto type) {
    return with_rule(p.kind, [&](auto rule) {
      return p.up ? visit(type, rule, std::true_type()) : visit(type, rule, std::false_type());
    });
  });
}

}  // namespace

cudaError_t launch(const ActivationProblem& p, cudaStream_t stream) {
  return with_activation(p, [&](auto type, auto rule, auto gated) {
    Arrays<Activate<decltype(rule), gated>> a{{p.x}, {p.result}, {p.amaxes}, p.batch, p.size, p.columns, nullptr};
    if constexpr (gated) a.operands[1] = p.up;
    return launch_rule<type>(a, stream);
  });
}

cudaError_t launch(const ActivationGradientProblem& p, cudaStream_t stream) {
  return with_activation(p, [&](auto type, auto rule, auto gated) {
    Arrays<ActivateBackward<decltype(rule), gated>> a{{p.dy, p.x}, {p.dx}, {p.of_dx}, p.batch, p.size, p.columns, p.sums};
    if constexpr (gated) a.operands[2] = p.up, a.results[1] = p.dup, a.amaxes[1] = p.of_dup;
    return launch_rule<type>(a, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
