// Activations and their gradients that are quantised and not stored.
#include "activation_quantize.h"
#include "by_activation.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

constexpr ByActivation<ActivationQuantize> resolve_activation_quantize;
constexpr ByActivation<ActivationGradientQuantize> resolve_activation_gradient_quantize;

}  // namespace

JLP_DEFINE_ENTRY(activation_quantize, ActivationQuantizeProblem, resolve_activation_quantize)
JLP_DEFINE_ENTRY(activation_gradient_quantize, ActivationGradientQuantizeProblem, resolve_activation_gradient_quantize)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
