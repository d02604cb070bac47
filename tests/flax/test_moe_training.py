"""The block of experts of Linen and NNX in training: its loss, repeated by scan, on a mesh."""

import functools
import itertools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.flax.experts import EXPERTS, K, X, block, made, total
from tests.flax.libraries import LIBRARIES, weighted
from tests.helpers import assert_same_bytes, often
from tests.moe.stack import RECIPES
from tests.sharding.meshes import collectives, mesh_of, place

pytestmark = pytest.mark.sampled(5)

FLOAT32 = {"dtype": jnp.float32}


def trained(model, x, loss, steps=12):
    """The values of a loss of output and aux over steps of Adam."""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(tree, state):
        value, gradients = jax.value_and_grad(lambda tree: loss(*model.apply(tree, x)))(tree)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(tree, updates), state, value

    tree, values = model.tree, []
    state = jax.tree.map(jnp.zeros_like, jax.eval_shape(optimizer.init, tree))
    for _ in range(steps):
        tree, state, value = step(tree, state)
        values.append(float(value))
    return values


class TestTraining:
    @pytest.mark.parametrize(
        ("library", "name"),
        often([("linen", "bf16"), ("nnx", "nvfp4")], list(itertools.product(LIBRARIES, ["bf16", "nvfp4"])), 2),
    )
    def test_lowers_the_loss(self, library, name):
        def loss(y, aux):
            return jnp.mean((y - jnp.roll(X, 1, axis=-1)).astype(jnp.float32) ** 2) + aux.load_balance_loss

        with jlp.autocast(RECIPES[name], enabled=RECIPES[name] is not None):
            values = trained(made(LIBRARIES[library]), X, loss)
        assert values[-1] < 0.9 * values[0]

    def test_by_the_load_balance_loss_levels_the_load(self, library):
        model = made(library, routing=jlp.moe.RouterConfig(load_balance_coef=1.0))
        values = trained(model, X + 2, lambda y, aux: aux.load_balance_loss, 24)  # most to the same
        assert values[0] > 1.5 and values[-1] < 1.2


# each takes the model with remat and the one without; often the form that has most in it
TAPES = [("bf16", jnp.float32), ("nvfp4", jnp.bfloat16), ("nvfp4", jnp.float32)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), often([("nvfp4", jnp.bfloat16)], TAPES, 2))
def test_scan_and_remat_record_and_replay_a_tape(library, name, dtype):
    def call(block, x, tape):
        y, aux = block.moe(x, tape)
        return x + y, aux.tape

    def program(remat, differentiated=True):
        make = library.composed(call, moe=block(library, dtype=dtype))
        model = library.model(library.stack(make, 2, remat), X.astype(dtype), afresh.experts)
        keys = {"sr": jax.random.key(1)} if library.name == "linen" else {}

        def loss(tree, tape):
            y, used = model.apply(tree, X.astype(dtype), tape.experts, **keys)
            return weighted(y), (y, jlp.moe.RoutingTape(used))

        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True) if differentiated else loss)
        return lambda tape: compiled(model.tree, tape)

    afresh = jlp.moe.RoutingTape.afresh(2, X.shape[:-1], K)
    with jlp.autocast(RECIPES[name], enabled=RECIPES[name] is not None):
        remat = program(True)
        recorded = remat(afresh)
        tape = recorded[0][1][1]
        tape.check(EXPERTS, layers=2, tokens=X.shape[:-1])
        assert_same_bytes(remat(tape), recorded)
        if name != "bf16":  # XLA fuses another backward pass: a code that flips then makes more of it
            assert_same_bytes(program(False, differentiated=False)(tape)[1][1], tape)
            return
        other = program(False)(tape)
        assert_same_bytes(other[0][1][1], tape)
        for a, e in zip(jax.tree.leaves(other[1]), jax.tree.leaves(recorded[1]), strict=True):
            assert jnp.linalg.norm(a - e) <= 1e-6 * jnp.linalg.norm(e)


@pytest.fixture(autouse=True, scope="module")
def forget_results():
    yield
    on_one_device.cache_clear()


@functools.cache
def on_one_device(library):
    """The block's output and gradients."""
    model = made(LIBRARIES[library], shared_hidden_features=32, **FLOAT32)
    return model.run(X.astype(jnp.float32), loss=total)


@pytest.mark.slow
class TestMesh:
    def same_to_rounding(self, actual, expected):
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=3e-6 * max(1, np.abs(e).max()))

    @pytest.mark.parametrize(
        ("library", "kernels"),
        often(
            [("nnx", P()), ("nnx", P("a", "b", None))],
            list(itertools.product(LIBRARIES, [P(), P("a"), P("a", "b", None)])),
            2,
        ),
    )
    def test_split_tokens_and_kernels_give_what_one_device_gives(self, library, kernels):
        x, mesh = X.astype(jnp.float32), mesh_of((2, 4))
        model = made(LIBRARIES[library], shared_hidden_features=32, **FLOAT32)
        with jax.set_mesh(mesh):
            model.tree = jax.tree.map(lambda leaf: place(leaf, mesh, kernels if leaf.ndim == 3 else P()), model.tree)
            actual = model.run(place(x, mesh, P(("a", "b"))), loss=total)
        self.same_to_rounding(actual, on_one_device(library))

    def test_within_shard_map_one_sum_combines_the_experts(self, library):
        x, mesh = X.astype(jnp.float32), mesh_of((2, 4))
        alone = made(library, **FLOAT32)
        split = library.like(alone, block(library, exchange=jlp.moe.Exchange("b"), **FLOAT32))
        specs = jax.tree.map(lambda leaf: P("b") if leaf.ndim == 3 else P(), alone.tree)

        def call(tree, x):
            y, aux = split.apply(tree, x)
            return y, aux.tape

        apply = jax.shard_map(call, mesh=mesh, in_specs=(specs, P("a")), out_specs=P("a"))
        forward = jax.jit(apply).lower(alone.tree, x).compile()
        assert collectives(forward) == [("all-reduce", x.size // 2)]
        y, tape = forward(alone.tree, x)
        (expected, aux), *expected_gradients = alone.run(x, loss=lambda output: weighted(output[0]))
        assert_same_bytes(jax.device_get(tape), aux.tape)
        gradients = jax.jit(jax.grad(lambda tree, x: weighted(apply(tree, x)[0]), argnums=(0, 1)))(alone.tree, x)
        self.same_to_rounding((y, gradients), (expected, expected_gradients))

    def test_within_shard_map_unequal_splits_are_named(self, library):
        kernels_are_whole = {
            "linen": (flax.errors.ScopeParamShapeError, r"\(2, 64, 32\)"),
            "nnx": (ValueError, r"group_sizes \(2,\): needs"),
        }
        unequal = (ValueError, r"6 experts over the 4 devices of Exchange\(axis='b'\)")
        for experts, (error, message) in ((6, unequal), (8, kernels_are_whole[library.name])):
            model = library.like(made(library, experts), block(library, experts, exchange=jlp.moe.Exchange("b")))
            call = jax.shard_map(
                lambda tree, x: model.apply(tree, x)[0], mesh=mesh_of((2, 4)), in_specs=(P(), P("a")), out_specs=P("a")
            )
            with pytest.raises(error, match=message):
                jax.eval_shape(call, model.tree, X)
