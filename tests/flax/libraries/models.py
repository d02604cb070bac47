"""A module of either library and its arrays, which are numbers of numpy: initialisers would compile programs for every
shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT


def weights_of(y):
    """What output gradients are in these tests."""
    return np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape).astype(y.dtype)


def weighted(y):
    """A loss whose gradient are these weights."""
    return jnp.sum(y.astype(jnp.float32) * weights_of(y.astype(jnp.float32)))


def numbers(tree, seed=0):
    """Arrays for shapes and dtypes: new states of delayed scaling, else normal numbers; biases can not be missed."""

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if OVERWRITE_WITH_GRADIENT in name:
            return jax.device_put(np.full(leaf.shape, 0 if "history" in name else 1, np.float32))
        normal = np.random.default_rng([seed, *name.encode()]).standard_normal(leaf.shape)
        return jax.device_put(np.asarray(normal * (1 if "bias" in name else 0.125), leaf.dtype))

    return jax.tree_util.tree_map_with_path(fill, tree)


class Model:
    """A module of either library, and its arrays.

    Attributes:
        tree: parameters and states of delayed scaling as dicts, {"kernel": ..., "_overwrite_with_gradient": {...}} of
            a layer within the names of the layers. Tests differentiate by it, change it and compare it.
    """

    tree: Any

    def __call__(self, *inputs, **options):
        return self.apply(self.tree, *inputs, **options)

    def trained(self, optimizer, x, target, steps):
        """The tree after steps of an optimizer on the mean squared error, and the losses."""

        @jax.jit
        def step(tree, state):
            def loss(tree):
                return jnp.mean((self.apply(tree, x) - target).astype(jnp.float32) ** 2)

            value, gradients = jax.value_and_grad(loss)(tree)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(tree, updates), state, value

        tree, losses = self.tree, []
        state = jax.tree.map(jnp.zeros_like, jax.eval_shape(optimizer.init, tree))
        for _ in range(steps):
            tree, state, value = step(tree, state)
            losses.append(float(value))
        return tree, losses

    def program(self, *inputs, loss=None, **options):
        """The output, and gradients of the tree and of the first input, as a program that is not compiled yet.

        The output gradients are `weights_of` the output; or `loss` makes a number of it.
        """

        def outputs_and_gradients(tree, x, *more):
            def apply(tree, x):
                y = self.apply(tree, x, *more, **options)
                return (y if loss is None else loss(y)), y

            first, pullback, y = jax.vjp(apply, tree, x, has_aux=True)
            return y, *pullback(weights_of(first) if loss is None else jnp.ones_like(first))

        return jax.jit(outputs_and_gradients).lower(self.tree, *inputs)

    def run(self, *inputs, **options):
        """The output, and gradients of the tree and of the first input."""
        return self.program(*inputs, **options).compile()(self.tree, *inputs)
