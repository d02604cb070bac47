"""JAX's switches for debugging and strictness change no byte of any recipe's results and gradients."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import ONE_OF_EACH, assert_same_bytes, format_name, often, random_array
from tests.low_precision import STRUCTURES, recipes, state_for, without_state


@contextlib.contextmanager
def strict():
    """The switches that only ever raise an error: together they find what each of them finds."""
    with jax.debug_nans(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


MODES = {"disable_jit": jax.disable_jit, "strict": strict, "tracer leaks": jax.checking_leaks}
RECIPES = {name: recipe for name, recipe in STRUCTURES.items() if recipe is not None}
RECIPES |= recipes("fp8_current", "int4_qat", "mxfp8_qat clipped")


def by_mode_and_recipe(*chosen):
    """All of them, these always and the others in slow runs."""
    return pytest.mark.parametrize("mode, name", often(chosen, itertools.product(MODES, RECIPES), 2))


slowly_by_mode = pytest.mark.parametrize("mode", often(["disable_jit"], MODES))


@functools.cache
def operands():
    return random_array((32, 64)), random_array((64, 48), "float32", 1), random_array((48,), "float32", 2)


def vjp_of_linear(recipe):
    state = state_for(recipe)

    def linear(x, w, bias):
        return without_state(jlp.linear(x.reshape(2, 16, 64), w, bias, recipe=recipe, state=state), state)

    y, vjp = jax.vjp(linear, *operands())
    return y, *vjp(jnp.ones_like(y))


@functools.cache
def without_a_mode(name):
    """Eager, as those within a mode are: in one program XLA would sum products in high precision in another order."""
    return vjp_of_linear(RECIPES[name])


@pytest.mark.sampled(7)
@by_mode_and_recipe(
    *(("disable_jit", name) for name in ("nvfp4", "int4_qat clipped", "nvfp4_qat")),
    ("strict", "nvfp4"),
    ("strict", "fp8_current"),
)
def test_linear_and_its_gradients(mode, name):
    with MODES[mode]():
        found = vjp_of_linear(RECIPES[name])
    assert_same_bytes(found, without_a_mode(name))


@pytest.mark.slow
@pytest.mark.sampled(5)
@by_mode_and_recipe(("disable_jit", "nvfp4_qat"), ("strict", "mxfp8"))
def test_rows_in_groups_and_their_gradients(mode, name):
    recipe = RECIPES[name]
    if recipe.delayed is not None:
        pytest.skip("see tests/layers/grouped/test_delayed_scaling_transforms.py")
    x, w, bias = operands()

    def run():
        def product(x, w):
            return jlp.grouped_matmul(x, w, jnp.asarray([12, 0, 16], jnp.int32), np.stack([bias] * 3), recipe=recipe)

        y, vjp = jax.vjp(product, x, np.stack([w] * 3))
        return y, *vjp(jnp.ones_like(y))

    expected = jax.jit(run)()
    with MODES[mode]():
        assert_same_bytes(run(), expected)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.sampled(7)
@slowly_by_mode
@pytest.mark.parametrize(
    "fmt",
    often([jlp.NVFP4(), jlp.Int4(16, False)], [*ONE_OF_EACH, jlp.Int4(16, False), jlp.Int4(16)]),
    ids=format_name,
)
def test_ops(mode, fmt):
    _, w, bias = operands()

    def run():
        q = jlp.quantize(w.T, fmt)
        y = jlp.scaled_matmul(w.T, q, bias, activation="gelu", accumulate=jnp.ones((48, 48)))
        found = [q, q.dequantize(), y, jax.grad(lambda w: jlp.fake_quantize(w, fmt, ste="clipped").sum())(w)]
        if not isinstance(fmt, jlp.Int4):
            found += jlp.quantize_both(w, fmt, hadamard_columnwise=True, rounding="stochastic", key=jax.random.key(0))
        return found

    expected = jax.jit(run)()
    with MODES[mode]():
        assert_same_bytes(run(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["nvfp4", "int4_qat", "fp8_delayed"])
def test_layers(mode, name):
    x = operands()[0].astype(jnp.float32)  # Flax promotes by the caller's rules
    dense = jlp.linen.Dense(16)

    def layers():
        return [
            jlp.nnx.Linear(64, 32, rngs=nnx.Rngs(0)),
            jlp.nnx.LinearGeneral(64, (4, 8), rngs=nnx.Rngs(0)),
            jlp.nnx.Einsum("td,dh->th", (64, 32), (32,), rngs=nnx.Rngs(0)),
        ]

    def run():
        loss = lambda layer: layer(x).astype(jnp.float32).sum()  # noqa: E731
        gradients = [nnx.grad(loss)(layer) for layer in made]
        return gradients, jax.grad(lambda v: dense.apply(v, x).astype(jnp.float32).sum())(variables)

    with jlp.autocast(
        RECIPES[name]
    ):  # XLA compiles initialisers to other bits where it compiles them operation by operation
        made, variables = layers(), dense.init(jax.random.key(0), x)
        expected = run()
        with MODES[mode]():
            assert_same_bytes(run(), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), [*((mode, "nvfp4") for mode in MODES), ("strict", None)])
def test_experts(mode, name):
    x = operands()[0].astype(jnp.float32)
    moe = jlp.nnx.MoE(4, 64, 32, top_k=2, shared_hidden_features=16, rngs=nnx.Rngs(0))

    def loss(moe):
        y, aux = moe(x)
        replayed, _ = moe(x, tape=aux.tape)
        return y.astype(jnp.float32).sum() + replayed.astype(jnp.float32).sum() + aux.load_balance_loss

    # Bits of stochastic rounding without a key come from the gradient's own.
    recipe = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
    with jlp.autocast(recipe) if name else contextlib.nullcontext():
        expected = nnx.grad(loss)(moe)
        with MODES[mode]():
            found = nnx.grad(loss)(moe)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # XLA adds up the router's float32 products in another order, and codes at a rounding boundary flip.
        assert jnp.linalg.norm(a - b) <= (0.05 if name else 1e-3) * jnp.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tapes(mode):
    logits = jnp.log(jnp.arange(1.0, 33.0).reshape(8, 4) % 5 + 1)

    def run():
        routing = jlp.moe.route(logits, 2)
        replayed = jlp.moe.route(-logits, 2, jlp.moe.RouterConfig("sigmoid"), tape=routing.experts)
        where = jlp.moe.dispatch(routing.experts, 4)
        rows = jlp.moe.scatter_to_experts(logits, where)
        tape = jlp.moe.RoutingTape(routing.experts[None])
        return replayed, jlp.moe.combine(rows, routing.weights, where), jlp.moe.overlap(tape, tape)

    expected = run()
    with MODES[mode]():
        assert_same_bytes(run(), expected)
