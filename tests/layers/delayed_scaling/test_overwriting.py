"""States of layers that give no new value in a step stay, and states that a transformation has changed are an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.delayed_scaling import (
    OVERWRITE_WITH_GRADIENT,
    TENSORS,
    add_gradients,
    init_state,
    keep_unused,
    overwrite_with_gradient,
)
from tests.helpers import assert_same_bytes, often, random_array

RECIPE = jlp.DelayedScaling(amax_history_len=3)
X = random_array((16, 32), "float32")


def layer(params, x):
    return jlp.linear(x, params["kernel"], recipe=RECIPE, state=params[OVERWRITE_WITH_GRADIENT])[0]


def experts(params, x):
    """Of two experts, of which one has no rows."""
    sizes, state = jnp.array([16, 0]), params[OVERWRITE_WITH_GRADIENT]
    return jlp.grouped_matmul(x, params["kernel"], sizes, recipe=RECIPE, state=state)[0]


USES = {  # of the layer b beside a
    "plainly": lambda b, params, x: b(params, x),
    "not at all": lambda b, params, x: 0,
    "without a gradient": lambda b, params, x: jax.lax.stop_gradient(b(params, x)),
    "in a branch not taken": lambda b, params, x: jax.lax.cond(x[0, 0] > 1e9, b, lambda params, x: x, params, x),
}


def a_state(num_experts=None):
    """After three steps, no two numbers the same."""
    state = init_state(RECIPE, num_experts=num_experts)
    return {name: np.float32(i + 1 + np.arange(v.size).reshape(v.shape)) for i, (name, v) in enumerate(state.items())}


def a_tree():
    kernel = random_array((32, 32), "float32", 1)
    a, b = ({"kernel": kernel, OVERWRITE_WITH_GRADIENT: a_state()} for _ in "ab")
    of_experts = {"kernel": jnp.stack([kernel, kernel]), OVERWRITE_WITH_GRADIENT: a_state(2)}
    return {"a": a, "b": b, "experts": of_experts}


def loss_of(use):
    def loss(tree, x):
        y = layer(tree["a"], x) + sum(USES[use](b, tree[name], x) for name, b in (("b", layer), ("experts", experts)))
        return jnp.square(y).mean()

    return loss


def in_optax(loss, tree, with_params=True):
    transformation = overwrite_with_gradient(optax.sgd(0.0))
    updates, _ = transformation.update(
        jax.grad(loss)(tree, X), transformation.init(tree), tree if with_params else None
    )
    return optax.apply_updates(tree, updates)


def in_microbatches(loss, tree):
    """The second part never reaches b."""
    parts = jax.grad(loss)(tree, X), jax.grad(loss_of("not at all"))(tree, X)
    transformation = overwrite_with_gradient(optax.sgd(0.0))
    updates, _ = transformation.update(add_gradients(*parts), transformation.init(tree), tree)
    return optax.apply_updates(tree, updates)


def accumulated(loss, tree):
    _, gradients = jlp.accumulate_gradients(loss, microbatches=1)(tree, X)
    return keep_unused(gradients, tree)


WAYS = {
    "optax": in_optax,
    "optax without parameters": functools.partial(in_optax, with_params=False),
    "keep_unused": lambda loss, tree: keep_unused(jax.grad(loss)(tree, X), tree),
    "microbatches": in_microbatches,
    "accumulate_gradients": accumulated,
}


def states(tree):
    return {name: part[OVERWRITE_WITH_GRADIENT] for name, part in tree.items()}


@pytest.mark.parametrize("way", often(("optax", "microbatches"), WAYS))
def test_the_state_of_a_layer_without_a_new_value_stays(way):
    """And those that have one are rotated, with the amax that was seen in slot 0."""
    before = a_tree()
    found = jax.jit(lambda tree: {use: states(WAYS[way](loss_of(use), tree)) for use in USES})(before)
    for use, after in found.items():
        for name, state in states(before).items():
            if name == "a" or use == "plainly":
                for tensor in TENSORS:
                    history = np.roll(state[f"{tensor}_amax_history"], -1, axis=-1)
                    history[..., 0] = after[name][f"{tensor}_amax_history"][..., 0]
                    np.testing.assert_array_equal(after[name][f"{tensor}_amax_history"], history)
                assert np.max(after[name]["input_amax_history"][..., 0]) == np.abs(X).max()
            else:
                assert_same_bytes(after[name], state)


CHANGED = "a transformation has changed a layer's state.*overwrite_with_gradient the outermost"
SGD = functools.partial(optax.sgd, 0.001)
RIGHT = {
    "plain": lambda: overwrite_with_gradient(SGD()),
    "clipped": lambda: overwrite_with_gradient(optax.chain(optax.clip_by_global_norm(1e-3), SGD())),
    "every second step": lambda: overwrite_with_gradient(optax.MultiSteps(SGD(), 2)),
    "if finite": lambda: overwrite_with_gradient(optax.apply_if_finite(SGD(), 3)),
}
WRONG = {
    "no wrapper, sgd": SGD,
    "no wrapper, adamw": lambda: optax.adamw(1e-3),
    "clipped before": lambda: optax.chain(optax.clip_by_global_norm(1e-3), overwrite_with_gradient(SGD())),
    "scaled after": lambda: optax.chain(overwrite_with_gradient(SGD()), optax.scale(0.5)),
    "every second step": lambda: optax.MultiSteps(overwrite_with_gradient(SGD()), 2),
}


def train(transformation, steps=4, loss_scale=1.0):
    """The tree after steps on inputs of several magnitudes, and the last result."""

    @jax.jit
    def step(tree, state, x):
        def loss(tree):
            y = layer(tree["layer"], x)
            return loss_scale * jnp.square(y).mean(), y

        gradients, y = jax.grad(loss, has_aux=True)(tree)
        gradients = jax.tree.map(lambda g: g / loss_scale, gradients)
        updates, state = transformation.update(gradients, state, tree)
        return optax.apply_updates(tree, updates), state, y

    tree = {"layer": {"kernel": random_array((32, 32), "float32", 1), OVERWRITE_WITH_GRADIENT: init_state(RECIPE)}}
    state = transformation.init(tree)
    for k in range(steps):
        tree, state, y = step(tree, state, (1 + k) * X)
    return tree["layer"][OVERWRITE_WITH_GRADIENT], np.asarray(y)


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_state_passes_every_transformation_within_the_wrapper(make):
    state, y = train(make())
    np.testing.assert_allclose(state["input_amax_history"], [k * np.abs(X).max() for k in (4, 2, 3)], rtol=1e-6)
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    "options", [{"make": make} for make in WRONG.values()] + [{"loss_scale": 1024.0}], ids=[*WRONG, "loss scale"]
)
def test_a_state_that_a_transformation_has_changed_is_an_error(options, isa):
    make = options.pop("make", RIGHT["plain"])
    if isa == "cuda":  # where nothing stops a program
        assert np.isnan(train(make(), **options)[1]).all()
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=CHANGED):
        train(make(), **options)


@pytest.mark.parametrize("name", ["input_amax_history", "kernel_scale"])
def test_a_state_whose_numbers_are_known_is_refused_by_name(name):
    state = init_state(RECIPE)
    state[name] = state[name] - 2
    with pytest.raises(ValueError, match=rf"linear: state\['{name}'\] is \[-.*{CHANGED}"):
        jlp.linear(X, jnp.ones((32, 32)), recipe=RECIPE, state=state)


def test_gradients_of_other_parameters_are_refused():
    with pytest.raises(ValueError, match="keep_unused: gradients .* and params .* differ"):
        keep_unused({"a": 1.0}, {"b": 1.0})
