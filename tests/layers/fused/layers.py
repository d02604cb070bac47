"""Separate layers that `linears` and `mlp` must agree with, and steps of training that give all their gradients."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import jaxlowprec as jlp
from tests.helpers import random_array
from tests.low_precision import RECIPES, STRUCTURES, state_for

QUANTIZE, MULTIPLY = "jaxlowprec_quantize", "jaxlowprec_scaled_matmul"
KEY = jax.random.key(5)
EXACT = {"xla_allow_excess_precision": False}  # XLA rounds where it is told to, whatever it fuses
# XLA's CPU compiler otherwise drops barriers, those of jax.checkpoint as well, before it merges equal operations.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
NAMES = ("attention/query", "attention/key", "attention/value")
MLP = ("mlp/gate", "mlp/up", "mlp/down")
ACTIVATIONS = {
    "swiglu": jlp.swiglu,
    "geglu": jlp.geglu,
    "silu": jlp.silu,
    "gelu": jlp.gelu,
    "relu_squared": jlp.relu_squared,
}
SAVED = ("quantized", "8bit", "recompute")


DECODED = jlp.NVFP4BlockScaling(backward_override="dequantized")
OWN = {
    "decoded nvfp4": DECODED,
    "no wgrad": jlp.PerGemm(fprop=RECIPES["nvfp4"], dgrad=RECIPES["nvfp4"], wgrad=None),
    "by layer": jlp.PerLayer(((".*/(key|up)", RECIPES["mxfp8"]), (".*/value", None)), RECIPES["nvfp4"]),
    "down by itself": jlp.PerLayer(((".*/down", RECIPES["mxfp8"]),), RECIPES["nvfp4"]),
    "down in high precision": jlp.PerLayer(((".*/down", None),), RECIPES["nvfp4"]),
}
EVERY = RECIPES | OWN
CASES = (*STRUCTURES, *OWN)  # names of a recipe for each structure

# Nothing is quantised, or weights alone.
NO_QUANTISED_INPUT = tuple(name for name, recipe in RECIPES.items() if recipe is None or recipe.roles().ste is not None)


def weights(shape, seed):
    """float32, small enough for sums of products; divided by NumPy, for JAX would compile a program for each shape."""
    return jax.device_put(np.asarray(random_array(shape, "float32", seed)) / np.float32(8))


def operands(shape, features, dtype="bfloat16", seed=0):
    """x of that shape, a float32 kernel for each number of features, biases of which one is None, gradients."""
    x = random_array(shape, dtype, seed)
    kernels = [weights((shape[-1], n), seed + 1 + i) for i, n in enumerate(features)]
    biases = [None if i == 1 else random_array((n,), "float32", seed + 11 + i) for i, n in enumerate(features)]
    dys = [random_array((*shape[:-1], n), dtype, seed + 21 + i) for i, n in enumerate(features)]
    return x, kernels, biases, dys


def mlp_operands(shape, hidden, features, *, gated=True, dtype="bfloat16", seed=0):
    """x, kernels, biases and the gradient of the result."""
    x, kernels, biases, _ = operands(shape, [hidden] * (1 + gated), dtype, seed)
    kernels.append(weights((hidden, features), seed + 31))
    biases.append(random_array((features,), "float32", seed + 32))
    return x, kernels, biases, random_array((*shape[:-1], features), dtype, seed + 33)


def states_for(recipe, count):
    """As many states of delayed scaling, each with histories of its own; else None."""
    if recipe is None or state_for(recipe) is None:
        return None
    state = jax.device_get(state_for(recipe))
    return [jax.device_put({name: leaf * np.float32(2**i) for name, leaf in state.items()}) for i in range(count)]


def arguments(i, key=None, **of_each):
    """Those of layer i alone."""
    singular = {
        "biases": "bias",
        "quantized_kernels": "quantized_kernel",
        "names": "name",
        "states": "state",
    }
    own = {singular[name]: values[i] for name, values in of_each.items() if values is not None}
    return own | ({} if key is None else {"key": jax.random.fold_in(key, i)})


def separate_linears(x, kernels, *, key=None, recipe=None, precision=None, **of_each):
    """`linears` as calls of `linear`."""
    options = {"recipe": recipe, "precision": precision}
    found = [jlp.linear(x, w, **options, **arguments(i, key, **of_each)) for i, w in enumerate(kernels)]
    if of_each.get("states") is None:
        return tuple(found)
    return tuple(y for y, _ in found), tuple(state for _, state in found)


def composed_mlp(x, kernels, *, activation="swiglu", key=None, recipe=None, **of_each):
    """`mlp` as `linears`, the activation and `linear`."""
    last, function = len(kernels) - 1, activation if callable(activation) else ACTIVATIONS[activation]
    of_hidden = {name: values[:last] for name, values in of_each.items() if values is not None}
    operands = jlp.linears(x, kernels[:last], recipe=recipe, key=key, **of_hidden)
    down = {"recipe": recipe} | arguments(last, key, **of_each)
    if of_each.get("states") is None:
        return jlp.linear(function(*operands), kernels[last], **down)
    operands, states = operands
    y, state = jlp.linear(function(*operands), kernels[last], **down)
    return y, (*states, state)


def separate_mlp(x, kernels, *, activation="swiglu", key=None, recipe=None, **of_each):
    """`mlp` as calls of `linear` and of the activation."""
    last, function = len(kernels) - 1, activation if callable(activation) else ACTIVATIONS[activation]
    operands = [jlp.linear(x, w, recipe=recipe, **arguments(i, key, **of_each)) for i, w in enumerate(kernels[:last])]
    return jlp.linear(function(*operands), kernels[last], recipe=recipe, **arguments(last, key, **of_each))


def learned(function, of_each):
    """The function of x and of what learns: kernels, biases and states, where there are any."""

    def call(x, kernels, biases, states):
        given = {"biases": biases, "states": states}
        return function(x, kernels, **of_each | {name: v for name, v in given.items() if v is not None})

    return call


def step(function, x, kernels, dys, *, biases=None, states=None, sum_dx=None, **of_each):
    """Results, the gradients of x and of what learns, and the states for the next call, of a jitted training step.

    Arguments:
        sum_dx: None, or a function of x, kernels, states and dys that computes the gradient of x instead.
    """

    def run(x, kernels, biases, states, dys):
        call = learned(function, of_each)
        if states is None:
            ys, pullback = jax.vjp(lambda x, w, b: call(x, w, b, None), x, kernels, biases)
            handed_on = ()
        else:
            ys, pullback, *handed_on = jax.vjp(call, x, kernels, biases, states, has_aux=True)
        dx, *others = pullback(dys)
        return (ys, dx if sum_dx is None else sum_dx(x, kernels, states, dys), *others, *handed_on)

    ys, dx, *further = jax.jit(run, compiler_options=EXACT)(x, kernels, biases, states, dys)
    return ys, dx, further


def relative_error(actual, expected):
    a, e = np.float32(actual), np.float32(expected)
    return np.linalg.norm(a - e) / np.linalg.norm(e)


def traced_calls(function, *args):
    """How often a function calls each operation, before XLA merges calls of equal operands."""
    calls = collections.Counter()

    def count(jaxpr):
        for equation in jaxpr.eqns:
            calls[equation.primitive.name] += 1
            for leaf in jax.tree.leaves(equation.params, is_leaf=lambda leaf: isinstance(leaf, core.Jaxpr)):
                if isinstance(leaf, core.ClosedJaxpr | core.Jaxpr):
                    count(leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf)

    count(jax.make_jaxpr(function)(*args).jaxpr)
    return calls


def nbytes(leaves):
    """Of arrays, but for single numbers."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.size > 1)


def loss_of_layers(function, policy=None):
    """Of a stack of layers, each added to its input."""

    def layer(x, kernels):
        return x + function(x, kernels), None

    layer = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return lambda kernels, x: jnp.square(jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32)).mean()


def gradients_of_layers(function, policy, x, kernels):
    """Those of a stack of layers, under a policy, ours or JAX's, for what jax.checkpoint keeps."""
    ours, jaxs = jlp.checkpoint_policies, jax.checkpoint_policies
    if policy is not None:
        policy = ours.offload() if policy == "offload" else getattr(ours, policy, None) or getattr(jaxs, policy)
    return jax.jit(jax.grad(loss_of_layers(function, policy), (0, 1)))(kernels, x)


def measured(loss, kernels, x):
    """The results of a loss and its gradient, and telemetry's statistics."""
    results, found = jax.jit(lambda kernels, x: jlp.telemetry.value_and_grad(loss)(kernels, x))(kernels, x)
    return results, jlp.telemetry.read(found)


def assert_same_telemetry(found, expected, names):
    """Both have the same layers, tensors and statistics."""
    assert list(found) == list(expected) == sorted(names)
    for layer, tensors in expected.items():
        assert list(found[layer]) == list(tensors)
        for tensor, statistics in tensors.items():
            np.testing.assert_allclose(
                found[layer][tensor].values, statistics.values, rtol=1e-5, atol=1e-6, err_msg=f"{layer} {tensor}"
            )


def assert_same_traces(found, expected, names, *, values=True):
    """Both have the same layers, with the same numbers if `values`."""
    assert list(found.layers) == list(expected.layers) == list(names)
    for name, numbers in expected.layers.items() if values else ():
        np.testing.assert_allclose(found.layers[name], numbers, rtol=1e-5, atol=1e-5)
