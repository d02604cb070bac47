"""`jlp.optim.adamw` and `lion` within wrappers: one pass over codes and remainders, bytes of the general way."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.optim import FIXED, RelativeCode
from jaxlowprec.optim.leafwise import leafwise
from tests.helpers import assert_same_bytes
from tests.numpy_oracle import optimizers as oracle

SHAPES = {"w": (32, 160), "odd": (3, 5, 104), "b": (40,), "s": ()}
ADAMW, LION = (
    make(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1) for make in (jlp.optim.adamw, jlp.optim.lion)
)


def params(dtype=jnp.bfloat16):
    """Matrices of the dtype, and vectors of float32."""
    rng = np.random.default_rng(0)
    made = {name: np.asarray(rng.standard_normal(shape) * 0.1, np.float32) for name, shape in SHAPES.items()}
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in made.items()}


def gradients(i, dtype=jnp.bfloat16):
    rng = np.random.default_rng(100 + i)
    made = {name: np.asarray(rng.standard_normal(shape) * 0.01, np.float32) for name, shape in SHAPES.items()}
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in made.items()}


def updating(tx):
    def step(g, state, p):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    return jax.jit(step)


def applying(tx):
    return jax.jit(lambda g, state, p: jlp.optim.apply_gradients(tx, g, state, p))


def run(tx, p, step, steps=3, dtype=jnp.bfloat16):
    state = tx.init(p)
    for i in range(steps):
        p, state = step(gradients(i, dtype), state, p)
    return p, state


def general(tx):
    """The transformation without its way of one pass."""
    return optax.GradientTransformationExtraArgs(tx.init, lambda *arguments, **extra: tx.update(*arguments, **extra))


def wrapped(inner, bits=None, rules=None, by=lambda tx: tx):
    """Both wrappers, or only `quantized_state`. `by` is called on each inner transformation."""
    tx = jlp.optim.quantized_state(by(inner), rules, key=7, smallest=256)
    return tx if bits is None else jlp.optim.master_weights(by(tx), bits=bits, key=8)


KINDS = [
    pytest.param(None, jnp.float32, id="float32"),
    pytest.param(None, jnp.bfloat16, id="bfloat16 without masters"),
    *[pytest.param(bits, jnp.bfloat16, id=f"masters of {bits} bits") for bits in (32, 24, 16)],
]


@pytest.mark.parametrize(("bits", "dtype"), KINDS)
class TestBytes:
    @pytest.mark.parametrize("rule", ["adamw", "lion"])
    def test_are_those_of_the_specification(self, bits, dtype, rule):
        tx = jlp.optim.quantized_state(getattr(jlp.optim, rule)(1e-2, weight_decay=0.1), smallest=256)
        tx = tx if bits is None else jlp.optim.master_weights(tx, bits=bits)
        p, step = params(dtype), applying(tx)
        state = tx.init(p)
        expected = {
            name: list(
                oracle.steps(
                    [gradients(i)[name] for i in range(3)], p[name], 1e-2, path=name, weight_decay=0.1, rule=rule,
                    bits=bits if len(SHAPES[name]) > 1 else None, coded=len(SHAPES[name]) > 1,
                )
            )
            for name in ("w", "odd", "b")
        }  # fmt: skip
        for i in range(3):
            p, state = step(gradients(i), state, p)
            inner = state if bits is None else state.inner
            for name, each in expected.items():
                new, rest, mu, nu = each[i]
                assert_same_bytes(p[name], new)
                if rest is not None:
                    assert_same_bytes(state.remainders[name], rest)
                for moment, field in ((mu, "mu"), (nu, "nu"))[: 1 if rule == "lion" else 2]:
                    found = tuple(getattr(tree[0], field)[name] for tree in (inner.codes, inner.exponents))
                    assert_same_bytes(found, moment if isinstance(moment, tuple) else (moment, None))

    @pytest.mark.parametrize("gradients_of", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("inner", [ADAMW, LION], ids=["adamw", "lion"])
    def test_are_those_of_the_general_way(self, bits, dtype, gradients_of, inner):
        one_pass, other = wrapped(inner, bits), wrapped(inner, bits, by=general)
        assert leafwise(one_pass) and not leafwise(other)
        found = run(one_pass, params(dtype), updating(one_pass), dtype=gradients_of)
        assert_same_bytes(found, run(other, params(dtype), updating(other), dtype=gradients_of))
        assert_same_bytes(found, run(one_pass, params(dtype), applying(one_pass), dtype=gradients_of))

    def test_are_the_same_with_and_without_jit(self, bits, dtype):
        tx = wrapped(ADAMW, bits)
        eager = lambda g, state, p: jlp.optim.apply_gradients(tx, g, state, p)  # noqa: E731
        assert_same_bytes(run(tx, params(dtype), eager, 2), run(tx, params(dtype), applying(tx), 2))


NEAREST = {"mu": RelativeCode(True, "nearest"), "nu": RelativeCode(False, "nearest")}
BETWEEN = {
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(1e9), tx),
    "masked": lambda tx: optax.masked(tx, {name: True for name in SHAPES}),
    "multi_transform": lambda tx: optax.multi_transform({"all": tx}, {name: "all" for name in SHAPES}),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_transformations_between_take_the_general_way(name):
    """To nearest, as paths within the state differ, and so draws do."""
    tx, direct = wrapped(BETWEEN[name](ADAMW), 32, NEAREST), wrapped(ADAMW, 32, NEAREST)
    outside = jlp.optim.master_weights(BETWEEN[name](wrapped(ADAMW, None, NEAREST)))
    (expected, state), *others = (run(t, params(), updating(t)) for t in (direct, tx, outside))
    arrays = lambda state: sorted((x.dtype.name, x.tobytes()) for x in jax.tree.leaves(state) if x.ndim > 1)  # noqa: E731
    for found, after in others:
        assert_same_bytes(found, expected)
        assert arrays(jax.device_get(after)) == arrays(jax.device_get(state))


def test_codes_that_the_operation_has_not_are_decoded():
    """Each leaf on its own: of these, only nu stays in its codes."""
    rules = {"mu": FIXED}
    found, state = run(tx := wrapped(ADAMW, 32, rules), params(), applying(tx))
    other = wrapped(ADAMW, 32, rules, by=general)
    assert_same_bytes((found, state), run(other, params(), updating(other)))
    assert state.inner.codes[0].mu["w"].dtype == jnp.int8
    leaves = {leaf.path: leaf for leaf in jlp.optim.explain_state(tx, params()).leaves}
    marked = {path: leaf.one_pass for path, leaf in leaves.items() if path.endswith("/w") or path.endswith("/b")}
    assert marked == {
        "inner/codes/0/mu/w": False,
        "inner/codes/0/nu/w": True,
        "inner/codes/0/mu/b": True,
        "inner/codes/0/nu/b": True,
        "inner/exponents/0/mu/w": False,
        "inner/exponents/0/nu/w": True,
        "remainders/w": True,
    }


def test_explain_state_says_what_takes_one_pass():
    p = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(64)}
    table = str(jlp.optim.explain_state(jlp.optim.master_weights(jlp.optim.quantized_state(ADAMW)), p))
    assert re.search(r"codes/0/nu/w .*unsigned float8 1x32, stochastic; one pass\n", table)
    assert re.search(r"codes/0/nu/b .*stays: a vector; one pass\n", table)
    assert re.search(r"remainders/w .*remainder of 32 bits; one pass\n", table)
    assert re.search(r"codes/0/count .*stays: int32\n", table)
    lions = str(jlp.optim.explain_state(jlp.optim.quantized_state(LION), p))
    assert re.search(r"codes/0/mu/w .*signed float8 1x32, stochastic; one pass\n", lions)
    for tx in (optax.adamw(1e-3), optax.chain(ADAMW)):
        assert "one pass" not in str(jlp.optim.explain_state(jlp.optim.quantized_state(tx), p))


def test_wrappers_in_the_other_order():
    tx = jlp.optim.quantized_state(jlp.optim.master_weights(ADAMW), smallest=256)
    other = jlp.optim.quantized_state(general(jlp.optim.master_weights(general(ADAMW))), smallest=256)
    found, state = run(tx, params(), updating(tx))
    assert_same_bytes((found, state), run(other, params(), updating(other)))
    assert state.codes.inner[0].nu["w"].dtype == jnp.uint8 and leafwise(tx)


def test_a_replaced_update_is_not_passed_by():
    tx = jlp.optim.adamw(1e-2)
    frozen = tx._replace(update=lambda g, state, p=None, **extra: (jax.tree.map(jnp.zeros_like, g), state))
    p = params(jnp.float32)
    for outer in (frozen, jlp.optim.quantized_state(frozen)):
        after, _ = jlp.optim.apply_gradients(outer, p, outer.init(p), p)
        assert_same_bytes(after, p)


def test_donated_arrays_are_updated_in_place():
    p = {"w": jnp.ones((64, 96), jnp.bfloat16), "b": jnp.ones(64)}
    tx = jlp.optim.master_weights(jlp.optim.quantized_state(ADAMW))
    state = tx.init(p)
    step = jax.jit(lambda g, state, p: jlp.optim.apply_gradients(tx, g, state, p), donate_argnums=(1, 2))
    memory = step.lower(p, state, p).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves((state, p)))


def test_an_update_makes_no_arrays_of_the_parameters_size():
    """An eighth of a byte per parameter, for exponents and words; the general way has several of float32."""
    p = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}

    def temporary(tx):
        state = jax.eval_shape(tx.init, p)
        step = jax.jit(lambda g, state, p: jlp.optim.apply_gradients(tx, g, state, p), donate_argnums=(1, 2))
        return step.lower(p, state, p).compile().memory_analysis().temp_size_in_bytes / 1024**2

    assert temporary(wrapped(ADAMW, 32)) < 0.125
    assert temporary(wrapped(ADAMW, 32, by=general)) > 2


def test_a_state_of_another_version_becomes_nan():
    p = params()
    for bits in (None, 32):
        tx = wrapped(ADAMW, bits)
        state = tx.init(p)
        with pytest.raises(ValueError, match="the state has version 2"):
            jlp.optim.apply_gradients(tx, gradients(0), state._replace(version=jnp.int32(2)), p)
        after, _ = applying(tx)(gradients(0), state._replace(version=jnp.int32(2)), p)
        assert np.isnan(np.asarray(after["w"], np.float32)).all()


def test_a_nan_poisons_its_block():
    """Of moments; of weights only itself, until the next step."""
    tx, p = wrapped(ADAMW, 32), params()
    state, step = tx.init(p), applying(tx)
    bad = gradients(0)
    bad["w"][3, 40] = np.nan
    for i, count in enumerate((1, 32)):
        p, state = step(bad if i == 0 else gradients(i), state, p)
        assert np.isnan(np.asarray(p["w"], np.float32)).sum() == count
    assert np.all(np.asarray(state.inner.exponents[0].nu["w"])[3, 1] == 255)
    assert np.isfinite(np.asarray(p["odd"], np.float32)).all()


def test_other_transformations_take_updates():
    """Also with further arguments of the update."""
    seen = []
    inner = optax.GradientTransformationExtraArgs(
        lambda p: (), lambda g, state, p=None, *, value, **extra: (seen.append(value) or g, state)
    )
    p = params(jnp.float32)
    after, _ = jlp.optim.apply_gradients(inner, p, (), p, value=3)
    assert seen == [3] and after["w"][0, 0] == 2 * p["w"][0, 0]


def test_errors_name_the_state():
    tx = wrapped(ADAMW, 32)
    state = tx.init(params())
    with pytest.raises(ValueError, match=r"master_weights: update was called without params"):
        tx.update(gradients(0), state)
    with pytest.raises(ValueError, match=r"adamw: update was called without params"):
        quantized = wrapped(ADAMW)
        quantized.update(gradients(0), quantized.init(gradients(0)))
    other = wrapped(jlp.optim.adamw(1e-3), 32)
    with pytest.raises(ValueError, match="made for other parameters or by another transformation"):
        other.update(gradients(0), state, params())


class Weights(NamedTuple):
    w: Any
    odd: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    w: Any
    odd: Any


@pytest.mark.parametrize("by", [lambda tx: tx, general], ids=["one pass", "general way"])
@pytest.mark.parametrize("kind", [Weights, Module])
def test_parameters_in_a_class_have_the_draws_of_those_in_a_dict(kind, by):
    """Its fields are theirs, and none of the state's."""

    def of_class(tree):
        return kind(tree["w"], tree["odd"])

    tx = wrapped(ADAMW, 16, by=by)
    p, other = of_class(params()), {name: params()[name] for name in ("w", "odd")}
    state, beside, step = tx.init(p), tx.init(other), applying(tx)
    for i in range(2):
        g = gradients(i)
        p, state = step(of_class(g), state, p)
        other, beside = step({"w": g["w"], "odd": g["odd"]}, beside, other)
    assert_same_bytes(p, of_class(other))
    assert_same_bytes(state.inner.codes[0].nu, of_class(beside.inner.codes[0].nu))
