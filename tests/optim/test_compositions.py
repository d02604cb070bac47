"""Both wrappers within and around optax's transformations, in Flax's trainers, and in checkpoints."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jaxlowprec as jlp
from jaxlowprec.delayed_scaling import OVERWRITE_WITH_GRADIENT, overwrite_with_gradient
from tests.helpers import assert_same_bytes

LABELS = {"emb": "adam", "w": "muon", "b": "adam"}
MASK = {"emb": False, "w": True, "b": True}


def params(dtype=jnp.float32):
    shapes = {"emb": (256, 32), "w": (64, 96), "b": (64,)}
    made = {n: jax.random.normal(jax.random.key(i), s) * 0.02 for i, (n, s) in enumerate(shapes.items())}
    return {name: x.astype(dtype) if x.ndim > 1 else x for name, x in made.items()}


def gradients(i, like):
    return {
        n: jax.random.normal(jax.random.fold_in(jax.random.key(i), x.size), x.shape, x.dtype) for n, x in like.items()
    }


def stepper(tx):
    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def run(tx, p, steps=3):
    state, step = tx.init(p), stepper(tx)
    for i in range(steps):
        p, state = step(gradients(i, p), state, p)
    return p, state


def quantized(inner, *args, **kwargs):
    return jlp.optim.quantized_state(inner, *args, **kwargs)


def both(inner):
    return jlp.optim.master_weights(quantized(inner))


SCHEDULE = optax.cosine_decay_schedule(1e-3, 100)
ADAMW = optax.adamw(SCHEDULE, weight_decay=0.1)
OURS = jlp.optim.adamw(SCHEDULE, weight_decay=0.1)
every_adamw = pytest.mark.parametrize("adamw", [ADAMW, OURS], ids=["optax's", "ours"])
INNER = {
    "adamw": ADAMW,
    "our adamw": OURS,
    "our adamw, clipped": optax.chain(optax.clip_by_global_norm(1.0), OURS),
    "our adamw, injected": optax.inject_hyperparams(jlp.optim.adamw)(SCHEDULE, weight_decay=0.1),
    "our adamw, MultiSteps": optax.MultiSteps(OURS, 2).gradient_transformation(),
    "our adamw, masked": jlp.optim.adamw(SCHEDULE, weight_decay=0.1, mask=MASK),
    "lion": optax.lion(1e-3),
    "sgd with momentum": optax.sgd(1e-3, 0.9),
    "muon": optax.contrib.muon(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    "masked": optax.masked(ADAMW, MASK),
    "multi_transform": optax.multi_transform({"adam": ADAMW, "muon": optax.contrib.muon(1e-3)}, LABELS),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 1e-4, 10)),
    "MultiSteps": optax.MultiSteps(ADAMW, 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(ADAMW, 3),
    "adafactor": optax.adafactor(1e-3),
    "novograd": optax.novograd(1e-3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
}


@pytest.mark.parametrize("name", INNER)
def test_any_inner_transformation_steps_as_without(name):
    """The first step is the same; later ones are near. States keep their structure."""
    inner, p = INNER[name], params()
    tx = quantized(inner)
    assert_same_bytes(tx.update(gradients(0, p), tx.init(p), p)[0], inner.update(gradients(0, p), inner.init(p), p)[0])
    expected, plain = run(inner, p)
    found, state = run(tx, p)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(p))
    for a, e, before in zip(*(jax.tree.leaves(tree) for tree in (found, expected, p)), strict=True):
        moved = np.sqrt(np.mean(np.asarray(e - before, np.float64) ** 2))
        error = np.sqrt(np.mean(np.asarray(a - e, np.float64) ** 2))
        assert error <= 0.1 * moved or name == "lion", (error, moved)  # a sign may turn
    nbytes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (state, plain)]
    assert nbytes[0] < 0.9 * nbytes[1] or name == "adafactor"


@pytest.mark.parametrize("name", INNER)
def test_masters_take_any_inner_transformation(name):
    inner, p = INNER[name], params(jnp.bfloat16)
    found, state = run(both(inner), p)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, p)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(found))
    assert jax.tree.structure(state) == jax.tree.structure(both(inner).init(p))
    assert state.remainders["b"] is None and state.remainders["w"].dtype == jnp.int16
    assert name == "masked" or np.any(state.remainders["emb"])


OUTER = {
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, MASK),
    "multi_transform": lambda tx: optax.multi_transform(
        {"adam": tx, "muon": quantized(optax.contrib.muon(1e-3))}, LABELS
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@every_adamw
@pytest.mark.parametrize("name", OUTER)
def test_any_outer_transformation(name, adamw):
    outer, p = OUTER[name], params()
    tx, plain = outer(quantized(adamw)), outer(adamw)
    found, state = run(tx, p, 4)
    if name != "multi_transform":
        expected, _ = run(plain, p, 4)
        for a, e, before in zip(*(jax.tree.leaves(tree) for tree in (found, expected, p)), strict=True):
            moved = np.sqrt(np.mean(np.asarray(e - before, np.float64) ** 2))
            assert np.sqrt(np.mean(np.asarray(a - e, np.float64) ** 2)) <= 0.1 * moved
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(p))
    explanation = jlp.optim.explain_state(tx if name != "MultiSteps" else tx.gradient_transformation(), p)
    assert explanation.nbytes == sum(x.nbytes for x in jax.tree.leaves(state))
    assert sum(leaf.code == str(jlp.optim.UNSIGNED) for leaf in explanation.leaves) == (
        1 if name in ("masked", "multi_transform") else 2
    )


@every_adamw
@pytest.mark.parametrize("name", [name for name in OUTER if name != "apply_if_finite"])
def test_masters_within_any_outer_transformation(name, adamw):
    """`apply_if_finite` goes inside: see below."""
    p = params(jnp.bfloat16)
    tx = OUTER[name](both(adamw))
    found, state = run(tx, p, 4)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, p)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(p))
    rests = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int16]
    assert len(rests) == (1 if name in ("masked", "multi_transform") else 2) and all(np.any(rest) for rest in rests)


@every_adamw
@pytest.mark.parametrize("gradients_of", [jnp.float32, jnp.bfloat16])
def test_multisteps_around_masters(gradients_of, adamw):
    p = params(jnp.bfloat16)
    tx = optax.MultiSteps(both(adamw), 2)
    state, step = tx.init(p), stepper(tx)
    for i in range(4):
        g = jax.tree.map(lambda x: x.astype(gradients_of) if x.ndim > 1 else x, gradients(i, p))
        before = p
        p, state = step(g, state, p)
        assert (i % 2 == 0) == np.array_equal(*(np.asarray(x["w"], np.float32) for x in (p, before)))


@every_adamw
def test_apply_if_finite_within_masters_keeps_weights(adamw):
    p = params(jnp.bfloat16)
    tx = jlp.optim.master_weights(optax.apply_if_finite(quantized(adamw), 3))
    p, state = run(tx, p)
    bad = gradients(5, p)
    bad["w"] = bad["w"].at[0, 0].set(jnp.nan)
    after, kept = stepper(tx)(bad, state, p)
    assert_same_bytes((after, kept.remainders), (p, state.remainders))
    assert kept.inner.total_notfinite == 1


@every_adamw
def test_apply_if_finite_around_masters_needs_float32_gradients(adamw):
    """It skips by zeros of the gradients' dtype, and the updates of masters are float32."""
    p = params(jnp.bfloat16)
    tx = optax.apply_if_finite(both(adamw), 3)
    with pytest.raises(TypeError, match="equal output types|identical types"):
        stepper(tx)(gradients(0, p), tx.init(p), p)
    wide = lambda g: jax.tree.map(lambda x: x.astype(jnp.float32), g)  # noqa: E731
    p, state = stepper(tx)(wide(gradients(0, p)), tx.init(p), p)
    bad = wide(gradients(1, p))
    bad["w"] = bad["w"].at[0, 0].set(jnp.nan)
    after, kept = stepper(tx)(bad, state, p)
    assert_same_bytes((after, kept.inner_state), (p, state.inner_state))
    assert kept.total_notfinite == 1 and np.any(state.inner_state.remainders["w"])


def test_hyperparameters_can_be_set():
    p = params()
    tx = quantized(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9))
    state = tx.init(p)
    state.codes.hyperparams["learning_rate"] = jnp.float32(0.0)
    updates, _ = tx.update(gradients(0, p), state, p)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))


@every_adamw
def test_delayed_scaling_states_beside_parameters(adamw):
    state = jlp.delayed_scaling.init_state(jlp.DelayedScaling(amax_history_len=3))
    tree = {"params": params(jnp.bfloat16), OVERWRITE_WITH_GRADIENT: state}
    tx = overwrite_with_gradient(both(adamw))
    new = {name: x.at[0].set(2.0) if "history" in name else x for name, x in state.items()}
    g = {"params": gradients(0, tree["params"]), OVERWRITE_WITH_GRADIENT: new}
    found, _ = stepper(tx)(g, tx.init(tree), tree)
    assert_same_bytes(found[OVERWRITE_WITH_GRADIENT], new)
    expected, _ = stepper(both(adamw))(g["params"], both(adamw).init(tree["params"]), tree["params"])
    assert_same_bytes(found["params"], expected)


@every_adamw
def test_accumulated_gradients(adamw):
    p = {"w": params(jnp.bfloat16)["w"]}
    tx = both(adamw)

    def loss(p, x):
        return jnp.mean(jlp.linear(x, p["w"]).astype(jnp.float32) ** 2)

    @jax.jit
    def step(p, state, x):
        value, g = jlp.accumulate_gradients(loss, microbatches=4)(p, x)
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state, value

    state, values = tx.init(p), []
    with jlp.autocast(jlp.MXFP8BlockScaling()):
        for _ in range(5):
            p, state, value = step(p, state, jax.random.normal(jax.random.key(0), (32, 64), jnp.bfloat16))
            values.append(float(value))
    assert values == sorted(values, reverse=True) and values[-1] < values[0]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = jlp.nnx.Linear(64, 96, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


@every_adamw
def test_nnx_optimizer_steps_as_a_tree_does(adamw):
    model = Model(nnx.Rngs(0))
    p = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    tx = both(adamw)
    warnings.simplefilter("error")  # for what an nnx.Variable says of an attribute that is asked for
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        g = nnx.grad(lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2))(model)
        optimizer.update(model, g)
        return nnx.to_pure_dict(g)

    state, update = tx.init(p), stepper(tx)
    for _ in range(3):
        g = step(model, optimizer)
        p, state = update(g, state, p)
        assert_same_bytes(nnx.to_pure_dict(nnx.state(model, nnx.Param)), p)
    assert optimizer.opt_state.inner.codes[0].nu["linear"]["kernel"].dtype == jnp.uint8


@every_adamw
def test_train_state_and_its_bytes(adamw):
    p = params(jnp.bfloat16)
    state = TrainState.create(apply_fn=None, params=p, tx=both(adamw))
    step = jax.jit(lambda state, g: state.apply_gradients(grads=g))
    for i in range(3):
        state = step(state, gradients(i, p))
    expected, opt_state = run(both(adamw), p)
    assert_same_bytes((state.params, state.opt_state), (expected, opt_state))
    back = serialization.from_bytes(state, serialization.to_bytes(state))
    assert_same_bytes(back, state)
    assert_same_bytes(step(back, gradients(3, p)), step(state, gradients(3, p)))


@every_adamw
def test_orbax_restores_what_goes_on_as_if_never_stopped(tmp_path, adamw):
    tx = both(adamw)
    p, state = run(tx, params(jnp.bfloat16))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": p, "state": state})
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "step", {"params": p, "state": state})
    assert jax.tree.structure(back["state"]) == jax.tree.structure(state)
    g = gradients(3, p)
    assert_same_bytes(stepper(tx)(g, back["state"], back["params"]), stepper(tx)(g, state, p))


@every_adamw
def test_tree_map_params_finds_codes_exponents_and_remainders(adamw):
    p = params(jnp.bfloat16)
    tx = jlp.optim.master_weights(quantized(adamw, {"nu": jlp.optim.UNSIGNED}))
    marked = optax.tree_map_params(
        tx, lambda _, name: name, tx.init(p), {name: name for name in p}, transform_non_params=lambda _: "other",
        is_leaf=lambda x: x is None,
    )  # fmt: skip
    assert marked.inner.codes[0].nu == marked.inner.exponents[0].mu == marked.remainders == {n: n for n in p}
    assert marked.words == marked.inner.step == marked.inner.codes[0].count == "other"
