"""Recorded in one pass and replayed in another: the same bits, whatever transformations the passes go through."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often
from tests.moe import stack
from tests.moe.stack import OFTEN, RECIPES, SLOWLY, block, each_recipe, step
from tests.sharding.meshes import mesh_of, place

pytestmark = pytest.mark.sampled(5)

PARAMS, X = stack.parameters(), stack.tokens()
AFRESH = jlp.moe.RoutingTape.afresh(stack.LAYERS, stack.TOKENS, stack.K)
FORMS = {
    "loop": {"scan": False},
    "scan": {"scan": True},
    "scan of remat": {"scan": True, "remat": True},
}


def assert_same_but_for_the_routers_sum(actual, expected):
    """Results of `step` of two programs. The router's own gradient is XLA's float32 product, whose order of summation
    follows the operands' layouts; all else has the same bytes."""
    found, wanted = (gradients[0]["router"].pop("kernel") for _, _, gradients in (actual, expected))
    assert jnp.linalg.norm(found - wanted) < 1e-6 * jnp.linalg.norm(wanted)
    assert_same_bytes(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(  # of the other recipes the form that has most in it
    ("form", "name"),
    often(
        [("scan of remat", name) for name in OFTEN],
        [*itertools.product(FORMS, OFTEN), *(("scan of remat", name) for name in SLOWLY)],
        2,
    ),
)
def test_replaying_a_record_gives_its_outputs_and_gradients(form, name):
    how = FORMS[form]
    moe = block(RECIPES[name])
    recorded = step(moe, PARAMS, X, AFRESH, **how)
    tape = recorded[1]
    tape.check(stack.EXPERTS, layers=stack.LAYERS, tokens=stack.TOKENS)
    assert_same_bytes(step(moe, PARAMS, X, tape, **how), recorded)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(recorded))


@pytest.mark.slow
@each_recipe
def test_a_pass_without_a_tape_records_the_same(recipe):
    moe = block(recipe)
    without, afresh = (jax.jit(lambda t: stack.run(moe, PARAMS, X, t))(t) for t in (None, AFRESH))
    assert_same_bytes(without, afresh)


@pytest.mark.slow
@each_recipe
def test_replay_under_remat_gives_the_gradients_without(recipe):
    moe = block(recipe)
    tape = jax.jit(lambda: stack.run(moe, PARAMS, X)[2])()
    plain, remat = (step(moe, PARAMS, X, tape, scan=True, remat=remat) for remat in (False, True))
    assert_same_but_for_the_routers_sum(remat, plain)


@pytest.mark.slow
def test_changed_weights_keep_the_choice_and_its_order():
    moe, others = block(), stack.parameters(seed=1)
    tape = step(moe, PARAMS, X)[1]
    replayed, fresh = step(moe, others, X, tape), step(moe, others, X)
    assert_same_bytes(replayed[1], tape)
    found = jlp.moe.overlap(fresh[1], tape)
    assert jnp.all(found.same_set < 0.5) and jnp.any(replayed[0] != fresh[0])


@pytest.mark.slow
def test_gradients_reach_every_part_through_a_frozen_choice():
    moe = block()
    tape = step(moe, PARAMS, X)[1]
    _, _, (of_params, of_x) = step(moe, stack.parameters(seed=1), X, tape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(of_params):
        assert jnp.all(jnp.any(leaf != 0, axis=tuple(range(1, leaf.ndim)))), path
    assert jnp.all(jnp.any(of_x != 0, axis=-1))


@pytest.mark.slow
def test_swapping_a_row_of_the_tape_only_reorders_a_sum():
    moe = block()
    y, tape, _ = step(moe, PARAMS, X, scan=False)
    swapped, used, _ = step(moe, PARAMS, X, jlp.moe.RoutingTape(tape.experts[..., ::-1]), scan=False)
    assert_same_bytes(used.experts, tape.experts[..., ::-1])
    np.testing.assert_allclose(*(v.astype(jnp.float32) for v in (swapped, y)), atol=0.05)


@pytest.mark.slow
def test_part_of_a_tape_may_choose_afresh():
    moe = block()
    recorded = step(moe, PARAMS, X)
    partly = jlp.moe.RoutingTape(recorded[1].experts.at[:, ::2].set(jlp.moe.AFRESH))
    assert_same_but_for_the_routers_sum(step(moe, PARAMS, X, partly), recorded)


@pytest.mark.slow
def test_an_invalid_row_makes_only_its_token_nan():
    moe = block(routing=jlp.moe.RouterConfig(load_balance_coef=0.0))
    tape = step(moe, PARAMS, X, scan=False)[1]
    spoilt = jlp.moe.RoutingTape(tape.experts.at[0, 2, 5].set(stack.EXPERTS))
    first = jax.tree.map(lambda leaf: leaf[0], PARAMS)
    y, aux = jax.jit(lambda t: moe.apply({"params": first}, X, t[0]))(spoilt)
    assert jnp.all(jnp.isnan(y[2, 5])) and jnp.isnan(aux.load_balance_loss)
    assert jnp.all(jnp.isfinite(y.at[2, 5].set(0)))
    with pytest.raises(ValueError, match=r"layer 0, token \(2, 5\)"):
        spoilt.check(stack.EXPERTS)


def test_a_tape_of_other_tokens_is_named():
    with pytest.raises(ValueError, match=r"MoE: x \(8, 16, 64\) and tape \(2, 8, 16, 2\); needs a tape"):
        block().apply({"params": jax.tree.map(lambda leaf: leaf[0], PARAMS)}, X, AFRESH.experts)


@pytest.mark.slow
@pytest.mark.parametrize("spec", often([P("a", "b")], [P(None, "a"), P("a", "b")]), ids=str)
def test_eight_devices_record_and_replay_as_one(spec):
    moe, mesh = block(dtype=jnp.float32), mesh_of((2, 4)) if "b" in str(spec) else mesh_of((8,))
    x = stack.tokens(dtype=jnp.float32)
    y, tape, gradients = step(moe, PARAMS, x)
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda leaf: place(leaf, mesh, P()), PARAMS)
        placed = place(x, mesh, spec)
        recorded = step(moe, params, placed)
        replayed = step(moe, params, placed, jlp.moe.RoutingTape(place(tape.experts, mesh, P(None, *spec))))
    assert_same_bytes(jax.device_get(recorded[1]), tape)
    for found in (recorded, replayed):
        assert_same_bytes(jax.device_get(found[1]), tape)
        for a, e in zip(jax.tree.leaves((found[0], found[2])), jax.tree.leaves((y, gradients)), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=3e-6 * max(1, np.abs(e).max()))


@pytest.mark.slow
def test_under_vmap_each_gives_what_it_gives_alone():
    moe, params = block(), jax.tree.map(lambda leaf: leaf[0], PARAMS)
    tape = step(moe, PARAMS, X)[1]
    together = jax.jit(jax.vmap(lambda x, t: moe.apply({"params": params}, x, t)[0]))(X, tape[0])
    alone = jax.jit(lambda x, t: moe.apply({"params": params}, x, t)[0])
    for i in (0, 5):
        np.testing.assert_allclose(
            *(v.astype(jnp.float32) for v in (together[i], alone(X[i], tape[0][i]))), atol=0.02, rtol=0.02
        )
