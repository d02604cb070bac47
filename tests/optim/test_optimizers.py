"""`jlp.optim.adamw` and `lion`: bits of the specification, near optax's, with their arguments and their states."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.optimizer_states import join_weight
from tests.helpers import assert_same_bytes
from tests.numpy_oracle import optimizers as oracle

SHAPES = {"w": (16, 104), "stack": (2, 3, 40), "b": (7,), "s": ()}
NAMES = ("adamw", "lion")
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 10)


def ours(name, *args, **options):
    return getattr(jlp.optim, name)(*args, **options)


def theirs(name, *args, **options):
    return getattr(optax, name)(*args, **options)


def params(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape) * 0.1, dtype) for name, shape in SHAPES.items()}


def gradients(i, dtype=np.float32):
    rng = np.random.default_rng(100 + i)
    return {name: np.asarray(rng.standard_normal(shape) * 0.01, dtype) for name, shape in SHAPES.items()}


def stepper(tx):
    def step(g, state, p):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    return jax.jit(step)


def run(tx, p, steps=3, step=None):
    state, step = tx.init(p), step or stepper(tx)
    for i in range(steps):
        p, state = step(gradients(i), state, p)
    return p, state


@pytest.mark.parametrize("name", NAMES)
class TestBits:
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_are_those_of_the_specification(self, name, dtype):
        """Of parameters, which float32 ones are, and of bfloat16 ones without masters, rounded to nearest."""
        options = {"b1": 0.8, "b2": 0.95, "weight_decay": 0.1} | ({"eps": 1e-6} if name == "adamw" else {})
        tx = ours(name, SCHEDULE, **options)
        p, state = params(dtype), tx.init(params(dtype))
        given = {leaf: [np.atleast_1d(gradients(i)[leaf]) for i in range(3)] for leaf in SHAPES}
        rate = lambda i: np.asarray(SCHEDULE(jnp.int32(i)))  # noqa: E731
        expected = {
            leaf: list(oracle.steps(given[leaf], np.atleast_1d(p[leaf]), rate, coded=False, rule=name, **options))
            for leaf in SHAPES
        }
        step = jax.jit(lambda g, s, p: jlp.optim.apply_gradients(tx, g, s, p))
        for i in range(3):
            p, state = step(gradients(i), state, p)
            for leaf, shape in SHAPES.items():
                new, _, mu, nu = (x if x is None else x.reshape(shape) for x in expected[leaf][i])
                assert_same_bytes((p[leaf], state[0].mu[leaf]), (new, mu))
                if name == "adamw":
                    assert_same_bytes(state[0].nu[leaf], nu)

    def test_updates_lead_to_the_parameters(self, name):
        """Also bfloat16 ones: the update is float32 there."""
        tx = ours(name, 1e-2, weight_decay=0.1)
        for dtype in (np.float32, jnp.bfloat16):
            whole = jax.jit(lambda g, s, p: jlp.optim.apply_gradients(tx, g, s, p))
            assert_same_bytes(run(tx, params(dtype)), run(tx, params(dtype), step=whole))

    def test_are_the_same_with_and_without_jit(self, name):
        tx = ours(name, SCHEDULE, weight_decay=0.1)
        eager = lambda g, s, p: jlp.optim.apply_gradients(tx, g, s, p)  # noqa: E731
        assert_same_bytes(run(tx, params()), run(tx, params(), step=eager))


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 65537, 2**31 - 1])
def test_corrections_are_powers_by_squares(count):
    from jaxlowprec.optim.optimizers import _scalars_of_adamw

    found = jax.jit(lambda count: _scalars_of_adamw(count, 1e-3, 0.1, 0.9, 0.9999, 1e-8))(jnp.int32(count))
    assert_same_bytes(found, oracle.scalars(count, 1e-3, b2=0.9999, weight_decay=0.1))


@pytest.mark.parametrize("name", NAMES)
class TestIsOptaxs:
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_near_after_100_steps(self, name, dtype):
        """A few units in the last place of numbers of 0.1; with masters those of float32, too."""
        masters = jlp.optim.master_weights if dtype != np.float32 else lambda tx: tx
        found, expected = (
            run(masters(make(name, 1e-3, weight_decay=0.1)), params(dtype), 100) for make in (ours, theirs)
        )
        for leaf in SHAPES:
            a, e = (
                np.asarray(x[0][leaf] if dtype == np.float32 else join_weight(x[0][leaf], x[1].remainders[leaf]))
                for x in (found, expected)
            )
            assert np.abs(a - params()[leaf]).max() > 1e-3, leaf
            assert np.abs(a - e).max() <= 32 * np.spacing(np.float32(0.1)), leaf

    def test_the_state_has_its_structure(self, name):
        mask = {"w": True, "stack": False, "b": True, "s": True}
        for rate in (1e-3, SCHEDULE):
            for options in ({}, {"mask": mask}):
                found, expected = (make(name, rate, **options).init(params()) for make in (ours, theirs))
                assert_same_bytes(found, expected)
                assert jax.tree.structure(found) == jax.tree.structure(expected)

    @pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: jlp.optim.quantized_state(tx, smallest=64)])
    def test_each_goes_on_from_a_state_of_the_other(self, name, around):
        both = [around(make(name, SCHEDULE, weight_decay=0.1)) for make in (ours, theirs)]
        for first, second in (both, both[::-1]):
            p, state = run(first, params())
            found, after = stepper(second)(gradients(9), state, p)
            expected, same = stepper(first)(gradients(9), state, p)
            assert jax.tree.structure(after) == jax.tree.structure(same)
            for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)

    def test_moments_are_float32_for_any_parameter(self, name):
        state = ours(name, 1e-3).init(params(jnp.bfloat16))
        assert {x.dtype for x in jax.tree.leaves(state[0]._replace(count=()))} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", NAMES)
class TestArguments:
    @pytest.mark.parametrize("is_function", [False, True])
    def test_mask_tells_what_decays(self, name, is_function):
        mask = lambda tree: {leaf: leaf == "w" for leaf in tree}  # noqa: E731
        options = {"weight_decay": 0.5, "mask": mask if is_function else mask(SHAPES)}
        found, _ = run(ours(name, 1e-2, **options), params())
        decayed, _ = run(ours(name, 1e-2, weight_decay=0.5), params())
        without, _ = run(ours(name, 1e-2, weight_decay=0.0), params())
        for leaf in SHAPES:
            assert_same_bytes(found[leaf], (decayed if leaf == "w" else without)[leaf])
            assert not np.array_equal(decayed[leaf], without[leaf])

    def test_a_mask_may_be_a_prefix(self, name):
        p = {"a": params(), "b": params()}
        tx = ours(name, 1e-2, weight_decay=0.5, mask={"a": False, "b": True})
        found, _ = tx.update({"a": gradients(0), "b": gradients(0)}, tx.init(p), p)
        for part, decay in (("a", 0.0), ("b", 0.5)):
            plain = ours(name, 1e-2, weight_decay=decay)
            assert_same_bytes(found[part], plain.update(gradients(0), plain.init(p[part]), p[part])[0])

    def test_hyperparameters_may_be_injected(self, name):
        """Arrays: 1 - b is computed in float32 then, as optax does."""
        tx = optax.inject_hyperparams(getattr(jlp.optim, name))(SCHEDULE, b1=0.75, b2=0.5, weight_decay=0.1)
        plain = ours(name, SCHEDULE, b1=0.75, b2=0.5, weight_decay=0.1)
        found, state = run(tx, params())
        assert_same_bytes(found, run(plain, params())[0])
        state.hyperparams["weight_decay"] = jnp.float32(0.0)
        state.hyperparams["b1"] = jnp.float32(0.0)
        updates, _ = tx.update(gradients(3), state, found)
        without = ours(name, SCHEDULE(3), b1=0.0, b2=0.5, weight_decay=0.0)
        assert_same_bytes(updates, without.update(gradients(3), state.inner_state, found)[0])

    def test_empty_trees_and_arrays(self, name):
        tx = ours(name, 1e-3)
        for p in ({}, {"w": jnp.zeros((0, 4))}, {"w": None, "b": jnp.ones(3)}):
            updates, state = tx.update(p, tx.init(p), p)
            assert jax.tree.structure(updates) == jax.tree.structure(p) and state[0].count == 1


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"learning_rate": None}, TypeError, "learning_rate=None; needs a number, an array [], or a function"),
            ({"learning_rate": float("nan")}, ValueError, "learning_rate=nan; needs a number"),
            ({"b1": 1}, ValueError, "b1=1; needs a number from 0 to below 1 or an array []"),
            ({"b2": -0.5}, ValueError, "b2=-0.5; needs a number from 0 to below 1"),
            ({"eps": -1e-8}, ValueError, "eps=-1e-08; needs a number from 0 on"),
            ({"weight_decay": True}, TypeError, "weight_decay=True; needs a number"),
            ({"weight_decay": np.ones(2)}, TypeError, "needs a number or an array []"),
        ],
    )
    def test_numbers(self, options, error, message):
        with pytest.raises(error, match=re.escape(message)):
            jlp.optim.adamw(**{"learning_rate": 1e-3, **options})
        if "eps" not in options:
            with pytest.raises(error, match=re.escape(message)):
                jlp.optim.lion(**{"learning_rate": 1e-3, **options})

    def test_parameters(self):
        tx = jlp.optim.adamw(1e-3)
        with pytest.raises(TypeError, match="the parameter 'h' is float16; needs float32 or bfloat16.*multi_transform"):
            tx.init({"h": jnp.ones(3, jnp.float16)})
        with pytest.raises(TypeError, match="the parameter 'n' is int; needs"):
            tx.init({"n": 3})

    def test_updates(self):
        tx, p = jlp.optim.adamw(SCHEDULE), params()
        state = tx.init(p)
        with pytest.raises(ValueError, match=r"needs update\(gradients, state, params\)"):
            tx.update(p, state)
        with pytest.raises(ValueError, match="the gradients are of other parameters than .*: needs one for each"):
            tx.update({"w": p["w"]}, state, p)
        with pytest.raises(ValueError, match="the state was made for other parameters"):
            tx.update({"w": p["w"]}, state, {"w": p["w"]})
        with pytest.raises(TypeError, match="the state is a TraceState; needs that"):
            tx.update(p, optax.trace(0.9).init(p), p)
        with pytest.raises(ValueError, match="no step count of a schedule"):
            tx.update(p, jlp.optim.adamw(1e-3).init(p), p)
        with pytest.raises(ValueError, match="the gradient of 'w' is .*; the parameter has the shape"):
            tx.update({**p, "w": p["w"].T}, state, p)
        with pytest.raises(TypeError, match="adamw: the gradient of 'w' is float16; needs float32 or bfloat16"):
            tx.update({**p, "w": p["w"].astype(jnp.float16)}, state, p)
        half = optax.adamw(SCHEDULE).init(params(jnp.bfloat16))
        with pytest.raises(ValueError, match=r"the state has bfloat16\[\] at '0/mu/s'|at '0/mu/b'"):
            tx.update(p, half, p)
        with pytest.raises(TypeError, match="lion: the state is a tuple; needs that .* or of optax.lion, returned"):
            jlp.optim.lion(SCHEDULE).update(p, state, p)
        with pytest.raises(TypeError, match="apply_gradients: tx=3; needs an optax.GradientTransformation"):
            jlp.optim.apply_gradients(3, p, state, p)
