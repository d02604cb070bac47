"""Experts as separate grouped products, which `grouped_mlp` must agree with, and steps of training of either."""

import jax
import numpy as np

import jaxlowprec as jlp
from tests.helpers import random_array
from tests.layers.fused.layers import ACTIVATIONS, CASES, EVERY, EXACT, weights

ROWS, K, F, N, E = 150, 64, 96, 48, 5
SIZES = {
    "uneven": (40, 0, 1, 64, 33),
    "one takes all": (0, 150, 0, 0, 0),
    "nobody": (0, 0, 0, 0, 0),
}
NAMES = ("experts/gate", "experts/up", "experts/down")
TAKEN = {name: EVERY[name] for name in CASES if name != "fp8_delayed"}  # see test_delayed_scaling.py
TAKEN |= {name: EVERY[name] for name in ("fp8_block", "fp8_current", "int4_qat")}


def mlp_operands(*, gated=True, dtype="bfloat16", experts=E, features=N):
    """x, kernels, biases of which up has none, and the gradient of the result."""
    shapes = [(experts, K, F)] * (1 + gated) + [(experts, F, features)]
    kernels = [weights(shape, 1 + i) for i, shape in enumerate(shapes)]
    biases = [random_array((experts, shape[2]), "float32", 11 + i) for i, shape in enumerate(shapes)]
    biases[-2] = None
    return random_array((ROWS, K), dtype), kernels, biases, random_array((ROWS, features), dtype, 21)


def separate_mlp(x, kernels, sizes, biases=None, recipe=None, key=None, *, activation="swiglu", names=None, **options):
    """`grouped_mlp` as calls of `grouped_matmul` and of the activation."""
    biases, names = biases or [None] * len(kernels), names or [""] * len(kernels)

    def product(i, x):
        own = None if key is None else jax.random.fold_in(key, i)
        return jlp.grouped_matmul(x, kernels[i], sizes, biases[i], recipe, key=own, name=names[i], **options)

    last, function = len(kernels) - 1, activation if callable(activation) else ACTIVATIONS[activation]
    return product(last, function(*(product(i, x) for i in range(last))))


def step(function, x, kernels, biases, dy, sizes=SIZES["uneven"], **options):
    """The result, and the gradients of x, the kernels and the biases, of a jitted training step."""

    def run(x, kernels, biases, dy, sizes):
        y, pullback = jax.vjp(lambda x, w, b: function(x, w, sizes, b, **options), x, kernels, biases)
        return y, *pullback(dy)

    return jax.jit(run, compiler_options=EXACT)(x, kernels, biases, dy, np.asarray(sizes, np.int32))
