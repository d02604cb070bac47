"""Delayed scaling in NNX, where states are variables of the module that its optimizers and checkpoints see."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.delayed_scaling import OVERWRITE_WITH_GRADIENT, overwrite_with_gradient
from jaxlowprec.recipes import silence
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, random_array

NNX = LIBRARIES["nnx"]
RECIPE = jlp.DelayedScaling(amax_history_len=3)
X = random_array((16, 32)).astype(jnp.float32)  # 3 * X is exact
AMAX = float(jnp.abs(X).max())
SCALES = jnp.asarray([1.0, 3.0, 2.0])
KINDS = {
    "Linear": ((32, 16), {}),
    "Linear float32 result": ((32, 16), {"preferred_element_type": "float32"}),
    "LinearGeneral": ((32, (4, 4)), {}),
    "Einsum": (("td,df->tf", (32, 16)), {}),
}


def made(kind="Linear", args=(32, 32), within=True, **options):
    with jlp.autocast(RECIPE, enabled=within):
        return NNX.model(NNX.maker(kind, *args, **options), X).module


def of_kind(name, within=True):
    args, options = KINDS[name]
    return made(name.split()[0], args, within, **options)


def state_of(layer):
    """The values of a layer's state, or of its gradient."""
    variables = layer[OVERWRITE_WITH_GRADIENT] if isinstance(layer, nnx.State) else layer._overwrite_with_gradient
    return {name: np.asarray(v[...]) for name, v in variables.items()}


def total(layer, x):
    return layer(x).astype(jnp.float32).sum()


def test_layers_made_outside_the_scope_have_no_state():
    assert made(within=False)._overwrite_with_gradient is None


def test_a_state_stays_until_an_optimizer_overwrites_it():
    layer = made()
    before = state_of(layer)
    with jlp.autocast(RECIPE):
        gradients = nnx.jit(nnx.grad(total))(layer, X)
    assert state_of(gradients)["input_amax_history"][0] == AMAX
    assert_same_bytes(state_of(layer), before)


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_state_is_remedied_by_add_delayed_scaling(name):
    layer = of_kind(name, within=False)
    with jlp.autocast(RECIPE):
        with pytest.raises(ValueError, match="call jaxlowprec.nnx.add_delayed_scaling"):
            layer(X)
        jlp.nnx.add_delayed_scaling(layer, RECIPE)
        assert_same_bytes(layer(X), of_kind(name)(X))


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_still_abstract_counts_as_new(name, monkeypatch):
    """As if a checkpoint of another recipe had filled what nnx.eval_shape made."""
    monkeypatch.setattr(silence, "_said", set())
    layer, (args, options) = of_kind(name), KINDS[name]
    with jlp.autocast(RECIPE):
        abstract = nnx.eval_shape(lambda: NNX.maker(name.split()[0], *args, **options)(nnx.Rngs(0)))
        for parameter in ("kernel", "bias"):
            if getattr(layer, parameter) is not None:
                getattr(abstract, parameter).set_value(getattr(layer, parameter).get_value())
        with pytest.warns(
            UserWarning, match="state is abstract.* counts as new; .*call jaxlowprec.nnx.add_delayed_scal"
        ):
            assert_same_bytes(abstract(X), layer(X))
        jlp.nnx.add_delayed_scaling(abstract, RECIPE)
        assert_same_bytes(state_of(abstract), state_of(layer))


def test_add_delayed_scaling_leaves_layers_with_own_recipes():
    own = jlp.DelayedScaling(amax_history_len=5)
    layers = nnx.List([made(within=False, recipe=recipe) for recipe in (own, None, jlp.FROM_CONTEXT)])
    jlp.nnx.add_delayed_scaling(layers, RECIPE)
    lengths = [layer._overwrite_with_gradient and state_of(layer)["input_amax_history"].size for layer in layers]
    assert lengths == [5, None, 3]


@pytest.mark.parametrize("name", KINDS)
def test_inference_of_a_closed_over_model(name):
    layer = of_kind(name)
    with jlp.autocast(RECIPE):
        assert_same_bytes(jax.jit(lambda x: layer(x))(X), layer(X))
        if name != "LinearGeneral":
            doubled = jax.eval_shape(lambda x: jax.vmap(layer)(jnp.stack([x, x])), X)
            assert doubled.shape == (2, 16, 16)


class TestReuse:
    """The same layer on 1, 3 and 2 times X; the gradient of its result is 1 everywhere."""

    def check(self, new):
        assert new["input_amax_history"].tolist() == [3 * AMAX, 0, 0]
        assert new["output_grad_amax_history"].tolist() == [1, 0, 0]
        assert new["kernel_amax_history"][0] == jnp.abs(made().kernel[...]).max()

    def test_in_vmap(self):
        def loss(m):
            return nnx.vmap(total, in_axes=(None, 0))(m, SCALES[:, None, None] * X).sum()

        with jlp.autocast(RECIPE):
            self.check(state_of(nnx.jit(nnx.grad(loss))(made())))

    def test_by_another_name(self):
        model = nnx.List([made()])
        model.append(model[0])
        with jlp.autocast(RECIPE):
            gradients = nnx.jit(nnx.grad(lambda m: total(m[0], 3 * X) + total(m[1], 2 * X)))(model)
        self.check(state_of(gradients[0]))

    def test_over_microbatches(self):
        layer = made()
        with jlp.autocast(RECIPE):
            gradient = nnx.jit(nnx.grad(total))
            first, second, third = (gradient(layer, k * X) for k in (1, 3, 2))
        summed = jlp.delayed_scaling.add_gradients(jlp.delayed_scaling.add_gradients(first, second), third)
        self.check(state_of(summed))
        np.testing.assert_allclose(summed["bias"][...], 3 * 16)


def block():
    layer = NNX.maker("Linear", 32, 32)
    return NNX.composed(lambda block, x: 0.5 * block.layer(block.layer(x)), layer=layer)


class Model(nnx.Module):
    """A stack made by nnx.vmap and run by nnx.scan, recomputed in the backward pass; a layer that it does not use."""

    def __init__(self, rngs):
        self.stack = NNX.stack(block(), 3, remat=True)(rngs)
        self.unused = jlp.nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


def model(seed=0):
    with jlp.autocast(RECIPE):
        return NNX.model(Model, X, seed=seed).module


@pytest.fixture(scope="module")
def trained():
    """A model after six steps, and the losses."""
    learning, target = model(), jnp.roll(X, 1, axis=-1)
    optimizer = nnx.Optimizer(learning, overwrite_with_gradient(optax.adam(3e-3)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(X) - target) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    with jlp.autocast(RECIPE):
        return learning, [float(step(learning, optimizer)) for _ in range(6)]


class TestModels:
    def test_layers_stacked_by_vmap_keep_their_own_states(self, trained):
        learnt, losses = trained
        assert losses[-1] < losses[1] < losses[0] * 1.5
        state = state_of(learnt.stack.blocks.layer)
        assert state["input_amax_history"].shape == (3, 3)
        assert np.all(state["kernel_amax_history"] > 0)
        assert len(set(state["output_grad_scale"].ravel().tolist())) == 3

    def test_an_unused_layer_stays_usable(self, trained):
        unused, fresh = trained[0].unused, model().unused
        with jlp.autocast(RECIPE):
            y = unused(X)
            fresh.kernel[...], fresh.bias[...] = unused.kernel[...], unused.bias[...]
            assert_same_bytes(y, fresh(X))

    def test_orbax_round_trip(self, trained, tmp_path):
        learnt, _ = trained
        pure = nnx.to_pure_dict(nnx.state(learnt))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "model", pure)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "model", jax.eval_shape(lambda: pure))
        other = model(seed=1)
        state = nnx.state(other)
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(other, state)
        call = nnx.jit(lambda model, x: model(x))
        with jlp.autocast(RECIPE):
            assert_same_bytes(call(other, X), call(learnt, X))
        assert_same_bytes(state_of(other.stack.blocks.layer), state_of(learnt.stack.blocks.layer))


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral"])
def test_quantized_kernels_have_the_scale_of_the_state(name):
    layer = of_kind(name)
    layer._overwrite_with_gradient["kernel_amax_history"][...] = jnp.asarray([2.0, 3.0, 0.5])
    with jlp.autocast(RECIPE), jlp.nnx.quantized_kernels(layer):
        assert layer._quantized_kernel().rowwise.scale == 1 / (np.float32(448) / np.float32(3))


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_with_a_state_is_tabulated(name):
    with jlp.autocast(RECIPE):
        assert "OverwriteWithGradient" in nnx.tabulate(of_kind(name), X, console_kwargs={"width": 240})


def test_the_bridge_to_linen_keeps_the_types_of_variables():
    """nnx.bridge makes a new type of a collection's name that is not registered, which then takes the name."""
    for kind in (jlp.nnx.Quantized, jlp.nnx.OverwriteWithGradient):
        assert nnx.variablelib.variable_type_from_name(kind.__name__) is kind
        assert nnx.variablelib.variable_name_from_type(kind) == kind.__name__


def test_intermediates_are_captured_beside_a_state():
    layer = made()
    with jlp.autocast(RECIPE):
        y, _ = nnx.capture(layer, nnx.Intermediate)(X)
        assert_same_bytes(y, layer(X))
