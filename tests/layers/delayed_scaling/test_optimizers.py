"""Delayed-scaling states beside parameters: past optax, in Flax's TrainState and in nnx.Optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxlowprec as jlp
from jaxlowprec import delayed_scaling
from jaxlowprec.delayed_scaling import OVERWRITE_WITH_GRADIENT, overwrite_with_gradient
from tests.helpers import assert_same_bytes, random_array

RECIPE = jlp.DelayedScaling(amax_history_len=3)
INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1)),
    "decayed": lambda: optax.chain(optax.add_decayed_weights(0.3), optax.scale(-0.1)),
    "every second step": lambda: optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "scheduled": lambda: optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 10)),
}


def params():
    return {"layer": {"kernel": random_array((4, 4), "float32"), "bias": random_array((4,), "float32", 1)}}


def gradients(seed):
    return jax.tree.map(lambda p: random_array(p.shape, "float32", seed), params())


def state(*values):
    """A state after steps in which every amax was such a value; 0.1 + 0.2 style numbers that a sum of differences would
    miss."""
    made = {name: np.array(value) for name, value in delayed_scaling.init_state(RECIPE).items()}
    for value in values:
        for tensor in delayed_scaling.TENSORS:
            made[f"{tensor}_scale"][:] = 1 if len(values) == 1 else value / 3
            made[f"{tensor}_amax_history"] = np.roll(made[f"{tensor}_amax_history"], -1)
            made[f"{tensor}_amax_history"][0] = value
    return {"layer": made}


def with_state(tree, *values):
    return {"params": tree, OVERWRITE_WITH_GRADIENT: state(*values)}


@pytest.mark.parametrize(
    ("inner", "jit"),
    [(inner, True) for inner in INNER.values()] + [(INNER["sgd"], False), (INNER["decayed"], False)],
    ids=[*INNER, "sgd, eager", "decayed, eager"],
)
def test_parameters_update_as_usual_and_states_take_gradients(inner, jit):
    """Eagerly bit for bit; in two programs XLA may round a product before it adds, or not."""
    plain, wrapped = inner(), overwrite_with_gradient(inner())

    def step(transformation, tree, opt_state, grads):
        updates, opt_state = transformation.update(grads, opt_state, tree)
        return optax.apply_updates(tree, updates), opt_state

    step = jax.jit(step, static_argnums=0) if jit else step
    expected, tree, seen = params(), with_state(params()), []
    plain_state, opt_state = jax.jit(plain.init)(expected), jax.jit(wrapped.init)(tree)
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(plain_state))
    assert sorted(leaf.shape for leaf in jax.tree.leaves(opt_state)) == sizes  # no moments of states
    for i, value in enumerate((0.3, 1e30, 1e-30, np.nan)):
        expected, plain_state = step(plain, expected, plain_state, gradients(i))
        seen.append(value)
        tree, opt_state = step(wrapped, tree, opt_state, with_state(gradients(i), *seen))
        compare = functools.partial(np.testing.assert_allclose, rtol=1e-6) if jit else assert_same_bytes
        jax.tree.map(compare, tree["params"], expected)
        assert_same_bytes(tree[OVERWRITE_WITH_GRADIENT], state(*seen))
    assert jax.tree.structure(tree) == jax.tree.structure(with_state(params()))


def test_states_may_be_anywhere_in_the_tree():
    tree = {"a": {"kernel": jnp.ones(2), OVERWRITE_WITH_GRADIENT: jnp.ones(2)}, "b": [jnp.ones(2)]}
    transformation = overwrite_with_gradient(optax.sgd(0.5))
    updates, _ = transformation.update(tree, transformation.init(tree), tree)
    new = optax.apply_updates(tree, jax.tree.map(lambda u: u, updates))
    assert new["a"]["kernel"].tolist() == new["b"][0].tolist() == [0.5, 0.5]
    assert new["a"][OVERWRITE_WITH_GRADIENT].tolist() == [1, 1]


def test_a_tree_without_states_is_as_before():
    transformation = overwrite_with_gradient(optax.adam(0.1))
    updates, _ = transformation.update(gradients(0), transformation.init(params()), params())
    expected, _ = optax.adam(0.1).update(gradients(0), optax.adam(0.1).init(params()))
    assert_same_bytes(updates, expected)


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = jlp.nnx.Linear(32, 32, rngs=rngs), jlp.nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.gelu(self.first(x)))


X, TARGET = random_array((16, 32), "float32"), random_array((16, 16), "float32", 1)


def test_nnx_optimizer_updates_parameters_as_without_states():
    """Against plain optax on the parameters alone, with the same gradients."""
    inner = INNER["adamw, clipped"]
    with jlp.autocast(RECIPE):
        model = Dense(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, overwrite_with_gradient(inner()), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - TARGET) ** 2))(model)
            optimizer.update(model, grads)
            return loss, nnx.state(grads)

        def apart(state):
            parameters, states = {}, {}
            for path, leaf in nnx.to_flat_state(state):
                chosen = states if OVERWRITE_WITH_GRADIENT in path else parameters
                chosen[path] = jnp.array(leaf[...])
            return parameters, states

        expected, _ = apart(nnx.state(model, nnx.Param))
        plain = inner()
        plain_state, losses = plain.init(expected), []
        plain_step = jax.jit(plain.update)
        for _ in range(4):
            loss, grads = step(model, optimizer)
            of_parameters, new_states = apart(grads)
            updates, plain_state = plain_step(of_parameters, plain_state, expected)
            expected = optax.apply_updates(expected, updates)
            parameters, states = apart(nnx.state(model, nnx.Param))
            jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7), parameters, expected)
            assert_same_bytes(states, new_states)
            losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert model.first._overwrite_with_gradient["input_amax_history"].tolist() == [float(jnp.abs(X).max())] * 3


def test_flaxs_train_state_keeps_an_unused_heads_state():
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x, second=True):
            first, other = jlp.linen.Dense(16, name="a"), jlp.linen.Dense(16, name="b")
            return first(x) + other(x) if second else first(x)

    model = Heads()
    with jlp.autocast(RECIPE):
        variables = jax.jit(model.init)(jax.random.key(0), X)
        train_state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def step(state, second, keep=delayed_scaling.keep_unused):
            gradients = jax.grad(lambda v: jnp.mean((model.apply(v, X, second) - TARGET) ** 2))(state.params)
            return state.apply_gradients(grads=keep(gradients, state.params))

        before = step(step(train_state, True), True)
        after = step(before, False)
        overwritten = step(before, False, lambda gradients, params: gradients)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"TrainState apply keep_unused\(gradients, "):
            jax.block_until_ready(step(overwritten, True))
    before, after = (state.params[OVERWRITE_WITH_GRADIENT] for state in (before, after))
    assert_same_bytes(after["b"], before["b"])
    amax = float(jnp.abs(X).max())
    assert after["a"]["input_amax_history"].tolist() == [amax] * 3 != before["a"]["input_amax_history"].tolist()


def test_flaxs_train_state_works_unchanged():
    layer, transformation = jlp.linen.Dense(16), INNER["adamw, clipped"]
    with jlp.autocast(RECIPE):
        variables = layer.init(jax.random.key(0), X)
        train_state = TrainState.create(apply_fn=layer.apply, params=variables, tx=transformation())
        plain, plain_state = variables["params"], transformation().init(variables["params"])

        def gradient(variables):
            return jax.grad(lambda v: jnp.mean((layer.apply(v, X) - TARGET) ** 2))(variables)

        step = jax.jit(lambda s: s.apply_gradients(grads=gradient(s.params)))
        gradients, update = jax.jit(gradient), jax.jit(transformation().update)
        for _ in range(3):
            grads = gradients(train_state.params)
            updates, plain_state = update(grads["params"], plain_state, plain)
            plain = jax.tree.map(np.add, plain, updates)
            train_state = step(train_state)
            new = train_state.params
            jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), new["params"], plain)
            assert_same_bytes(new[OVERWRITE_WITH_GRADIENT], grads[OVERWRITE_WITH_GRADIENT])
