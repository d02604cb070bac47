"""autocast(calibrating=True): high precision bit for bit, beside which amaxes are recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import delayed_scaling
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT
from tests.helpers import assert_same_bytes, random_array

pytestmark = pytest.mark.sampled(5)

RECIPE = jlp.DelayedScaling(amax_history_len=3)
DTYPES = [("bfloat16", "float32"), ("float32", "float32"), ("float32", "bfloat16")]
PRODUCTS = {
    "linear": (lambda x, w, **o: jlp.linear(x, w, **o), (32, 48)),
    "linear with a bias": (lambda x, w, **o: jlp.linear(x, w, jnp.linspace(-1, 1, 48), **o), (32, 48)),
    "dot_general": (lambda x, w, **o: jlp.dot_general(x, w, (((1,), (0,)), ((), ())), **o), (32, 48)),
    "einsum": (lambda x, w, **o: jlp.einsum("tk,kn->nt", x, w, **o), (48, 32)),
    "einsum to a number": (lambda x, w, **o: jlp.einsum("tk,kn->", x, w, **o), ()),
}


def calibrating():
    return jlp.autocast(RECIPE, calibrating=True)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_calibrating_is_high_precision_and_records_amaxes(name, dtypes):
    (product, shape), linear = PRODUCTS[name], name.startswith("linear")
    x, w = random_array((32, 64), dtypes[0]), random_array((64, 48), dtypes[1 if linear else 0], 1)
    dy = jnp.asarray(random_array((32, 48), seed=2).reshape(-1)[: int(np.prod(shape))].reshape(shape))
    expected, pullback = jax.vjp(product, x, w)
    dy = dy.astype(expected.dtype)
    state = delayed_scaling.init_state(RECIPE)
    with calibrating():
        y, calibrated, after = jax.vjp(lambda x, w, s: product(x, w, state=s), x, w, state, has_aux=True)
        *gradients, new = calibrated(dy)
        assert_same_bytes((y, after), (product(x, w, recipe=None), state))
    assert_same_bytes((y, *gradients), (expected, *pullback(dy)))
    for name, tensor in (("input", x), ("kernel", w), ("output_grad", dy)):
        assert new[f"{name}_amax_history"].tolist() == [float(jnp.abs(tensor).max()), 0, 0]
        assert new[f"{name}_scale"] == 1


def test_the_next_step_quantises_with_good_scales():
    x, w = 100 * random_array((32, 64), "float32"), 1e-3 * random_array((64, 48), "float32", 1)
    dy = 1e-4 * random_array((32, 48), "float32", 2)

    def step(state):
        y, pullback, _ = jax.vjp(lambda *a: jlp.linear(*a[:2], state=a[2]), x, w, state, has_aux=True)
        return (y, *pullback(dy)[:2]), pullback(dy)[2]

    with calibrating():
        exact, state = step(delayed_scaling.init_state(RECIPE))
    with jlp.autocast(RECIPE):
        cold, _ = step(delayed_scaling.init_state(RECIPE))
        warm, state = step(state)
    current = jlp.Float8CurrentScaling()
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=current), x, w)
    assert_same_bytes(warm, (y, *pullback(dy)))  # the amax of before is that of now
    for w_, c, e in zip(warm, cold, exact, strict=True):
        assert np.linalg.norm(w_ - e) < 0.1 * np.linalg.norm(e) < np.linalg.norm(c - e)


def test_calibrating_combines_by_max_and_rolls_once():
    x, w = random_array((32, 64)), random_array((64, 48), "float32", 1)

    def loss(state):
        y, state = jlp.linear(x, w, state=state)
        return y.astype(jnp.float32).sum() + jlp.linear(3 * x, w, state=state)[0].astype(jnp.float32).sum()

    with calibrating():
        new = jax.grad(loss)(delayed_scaling.init_state(RECIPE))
        new = jax.grad(loss)(new)
    assert new["input_amax_history"].tolist() == [float(jnp.abs(3 * x).max())] + [0, float(jnp.abs(3 * x).max())]
    assert new["output_grad_amax_history"].tolist() == [1, 0, 1]


def test_calibrating_differentiates_twice_as_high_precision_does():
    x, w = random_array((8, 16), "float32"), random_array((16, 4), "float32", 1)
    state = delayed_scaling.init_state(RECIPE)

    def penalty(w, call):
        return jnp.sum(jax.grad(lambda w: (call(w) ** 3).sum())(w) ** 2)

    with calibrating():
        actual = jax.grad(penalty)(w, lambda w: jlp.linear(x, w, state=state)[0])
    assert_same_bytes(actual, jax.grad(penalty)(w, lambda w: jlp.linear(x, w)))


class TestLayers:
    x = random_array((32, 64))

    @pytest.mark.slow
    def test_in_linen(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = jlp.linen.DenseGeneral((4, 8), dtype=jnp.bfloat16)(jlp.linen.Dense(64, dtype=jnp.bfloat16)(x))
                return jlp.linen.Einsum((4, 8, 16), "thk,hkf->tf", dtype=jnp.bfloat16)(x)

        with jlp.autocast(RECIPE):
            variables = Model().init(jax.random.key(0), self.x)
        variables["params"] = jax.tree.map(lambda p: p + 0.01, variables["params"])  # a bias that can be missed

        def loss(variables):
            return (Model().apply(variables, self.x).astype(jnp.float32) ** 2).sum()

        step = jax.jit(jax.value_and_grad(loss))
        expected = step(variables)
        with calibrating():
            value, gradients = step(variables)
        assert_same_bytes((value, gradients["params"]), (expected[0], expected[1]["params"]))
        histories = {k: v["input_amax_history"][0] for k, v in gradients[OVERWRITE_WITH_GRADIENT].items()}
        assert histories["Dense_0"] == jnp.abs(self.x).max() and all(h > 0 for h in histories.values())

    def test_in_nnx_and_the_optimizer(self):
        with jlp.autocast(RECIPE):
            layer = jlp.nnx.Linear(64, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(layer, delayed_scaling.overwrite_with_gradient(optax.sgd(0.0)), wrt=nnx.Param)

        def loss(m):
            return (m(self.x).astype(jnp.float32) ** 2).sum()

        expected, plain = nnx.value_and_grad(loss)(layer)
        with calibrating():
            value, gradients = nnx.value_and_grad(loss)(layer)
        assert_same_bytes((value, gradients["kernel"][...]), (expected, plain["kernel"][...]))
        optimizer.update(layer, gradients)
        assert layer._overwrite_with_gradient["input_amax_history"][0] == jnp.abs(self.x).max()
        with jlp.autocast(RECIPE):
            quantised = loss(layer)
        assert abs(quantised - value) < 0.1 * abs(value)


class TestErrors:
    x, w = random_array((8, 32)), random_array((32, 16), "float32", 1)

    @pytest.mark.parametrize("recipe", [jlp.MXFP8BlockScaling(), jlp.NVFP4BlockScaling(), jlp.Float8CurrentScaling()])
    def test_recipes_without_histories(self, recipe):
        with pytest.raises(ValueError, match="calibrating=True with .*it is for DelayedScaling's amax histories"):
            jlp.autocast(recipe, calibrating=True).__enter__()

    def test_a_missing_state(self):
        with calibrating(), pytest.raises(ValueError, match="linear: DelayedScaling needs the layer's amax histories"):
            jlp.linear(self.x, self.w)

    def test_a_quantised_kernel(self):
        state = delayed_scaling.init_state(RECIPE)
        quantized = jlp.quantize_kernel(self.w, RECIPE, state=state)
        plain = (((1,), (0,)), ((), ()))
        with calibrating():
            for call in (
                lambda **o: jlp.linear(self.x, self.w, **o),
                lambda **o: jlp.dot_general(self.x, self.w, plain, **o),
            ):
                with pytest.raises(ValueError, match="quantized_kernel= without a recipe that quantises"):
                    call(quantized_kernel=quantized, state=state)
            with pytest.raises(ValueError, match="keeps the weight .* in high precision"):
                jlp.quantize_kernel(self.w, state=state)

    def test_enabled_or_not_calibrating_records(self):
        """As in Transformer Engine, where calibrating goes with enabled=False."""
        with jlp.autocast(RECIPE, enabled=False, calibrating=True):
            assert jlp.current_recipe().delayed == RECIPE
        assert jlp.current_recipe() is None
