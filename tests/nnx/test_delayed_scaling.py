"""Delayed scaling in NNX: variables beside the parameters, combined by max wherever a layer is used again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.linears.delayed_scaling import OVERWRITE_WITH_GRADIENT, combined_by_max, overwrite_with_gradient
from tests.helpers import assert_same_bytes, random_array

RECIPE = jlp.DelayedScaling(amax_history_len=3)
X = random_array((16, 32)).astype(jnp.float32)  # 3 * X is exact
AMAX = float(jnp.abs(X).max())
SCALES = jnp.asarray([1.0, 3.0, 2.0])
LAYERS = {
    "Linear": lambda **o: jlp.nnx.Linear(32, 16, rngs=nnx.Rngs(0), **o),
    "Linear float32 result": lambda **o: jlp.nnx.Linear(32, 16, preferred_element_type="float32", rngs=nnx.Rngs(0)),
    "LinearGeneral": lambda **o: jlp.nnx.LinearGeneral(32, (4, 4), rngs=nnx.Rngs(0), **o),
    "Einsum": lambda **o: jlp.nnx.Einsum("td,df->tf", (32, 16), rngs=nnx.Rngs(0), **o),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def made(make=lambda: jlp.nnx.Linear(32, 32, rngs=nnx.Rngs(0))):
    with jlp.autocast(RECIPE):
        return make()


def state_of(layer):
    """The values of a layer's state, or of its gradient."""
    variables = layer[OVERWRITE_WITH_GRADIENT] if isinstance(layer, nnx.State) else layer._overwrite_with_gradient
    return {name: np.asarray(v[...]) for name, v in variables.items()}


def new_state(loss, model):
    with jlp.autocast(RECIPE):
        return state_of(nnx.jit(nnx.grad(loss))(model))


def total(layer, x):
    return layer(x).astype(jnp.float32).sum()


@each_layer
class TestLayers:
    def test_made_within_the_scope_they_have_a_state(self, make):
        assert_same_bytes(state_of(made(make)), jlp.delayed_scaling.init_state(RECIPE))
        assert make()._overwrite_with_gradient is None

    def test_a_step_is_linears(self, make):
        layer = made(make)
        layer._overwrite_with_gradient["input_amax_history"][...] = jnp.asarray([AMAX, 0, 0])
        state = {name: jnp.asarray(v) for name, v in state_of(layer).items()}

        def loss(kernel, state):
            return (jlp.linear(X, kernel.reshape(32, 16), recipe=RECIPE, state=state)[0] ** 2).sum()

        with jlp.autocast(RECIPE):
            gradients = nnx.grad(lambda m: (m(X) ** 2).sum())(layer)
        dw, new = jax.grad(loss, argnums=(0, 1))(layer.kernel[...], state)
        assert_same_bytes(gradients["kernel"][...], dw)
        assert_same_bytes(state_of(gradients), new)
        assert_same_bytes(state_of(layer), state)  # until an optimizer overwrites it

    def test_a_missing_state_names_the_remedy_which_helps(self, make):
        layer = make()
        with jlp.autocast(RECIPE):
            with pytest.raises(ValueError, match="call jaxlowprec.nnx.add_delayed_scaling"):
                layer(X)
            jlp.nnx.add_delayed_scaling(layer, RECIPE)
            assert_same_bytes(layer(X), made(make)(X))

    def test_another_history_length_names_the_remedy(self, make):
        layer = made(make)
        with jlp.autocast(jlp.DelayedScaling(amax_history_len=8)), pytest.raises(ValueError, match="make it anew"):
            layer(X)

    def test_inference_of_a_closed_over_model(self, make):
        layer = made(make)
        with jlp.autocast(RECIPE):
            assert_same_bytes(jax.jit(lambda x: layer(x))(X), layer(X))
            doubled = jax.jit(lambda x: jax.vmap(layer)(jnp.stack([x, x])))(X) if layer(X).ndim == 2 else None
            assert doubled is None or doubled.shape == (2, 16, 16)


def test_add_delayed_scaling_leaves_layers_with_own_recipes():
    own = jlp.DelayedScaling(amax_history_len=5)
    layers = nnx.List([jlp.nnx.Linear(32, 32, recipe=r, rngs=nnx.Rngs(0)) for r in (own, None, ...)])
    jlp.nnx.add_delayed_scaling(layers, RECIPE)
    lengths = [layer._overwrite_with_gradient and state_of(layer)["input_amax_history"].size for layer in layers]
    assert lengths == [5, None, 3]


class TestReuse:
    """The same layer on 1, 3 and 2 times X; the gradient of its result is 1 everywhere."""

    def check(self, new):
        assert new["input_amax_history"].tolist() == [3 * AMAX, 0, 0]
        assert new["output_grad_amax_history"].tolist() == [1, 0, 0]
        assert new["kernel_amax_history"][0] == jnp.abs(made().kernel[...]).max()
        assert [new[f"{name}_scale"].item() for name in ("input", "kernel", "output_grad")] == [1, 1, 1]

    def test_of_a_layer(self):
        self.check(new_state(lambda m: sum(total(m, k * X) for k in (1, 3, 2)), made()))

    def test_in_remat(self):
        def loss(m):
            return sum(nnx.remat(total)(m, k * X) for k in (1, 3, 2))

        self.check(new_state(loss, made()))

    def test_in_scan(self):
        def loss(m):
            def body(carry, k):
                return (carry[0] + total(carry[1], k * X), carry[1])

            return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)((jnp.float32(0), m), SCALES)[0]

        self.check(new_state(loss, made()))

    def test_in_vmap(self):
        def loss(m):
            return nnx.vmap(total, in_axes=(None, 0))(m, SCALES[:, None, None] * X).sum()

        self.check(new_state(loss, made()))

    def test_by_another_name(self):
        model = nnx.List([made()])
        model.append(model[0])
        with jlp.autocast(RECIPE):
            gradients = nnx.grad(lambda m: total(m[0], 3 * X) + total(m[1], 2 * X))(model)
        self.check(state_of(gradients[0]))

    def scanned(self, m):
        return jax.lax.scan(lambda c, k: (c + total(m, k * X), None), 0.0, SCALES)[0]

    def test_in_jaxs_transformations_raises_the_remedy_which_helps(self):
        with pytest.raises(ValueError, match=r"Linear: .*use Flax's counterpart \(nnx.scan.*combined_by_max"):
            new_state(self.scanned, made())
        self.check(new_state(combined_by_max(self.scanned), made()))

    def test_with_the_functional_interface(self):
        graph, state = nnx.split(made())
        with jlp.autocast(RECIPE):
            new = jax.grad(combined_by_max(lambda s: self.scanned(nnx.merge(graph, s))))(state)
        self.check(state_of(new))

    def test_over_microbatches(self):
        layer = made()
        with jlp.autocast(RECIPE):
            parts = [nnx.grad(total)(layer, k * X) for k in (1, 3, 2)]
        first, second, third = parts
        summed = jlp.delayed_scaling.add_gradients(jlp.delayed_scaling.add_gradients(first, second), third)
        self.check(state_of(summed))
        np.testing.assert_allclose(summed["bias"][...], 3 * 16)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layer = jlp.nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return 0.5 * self.layer(self.layer(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)
        self.unused = jlp.nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return nnx.remat(Block.__call__)(block, x)

        return forward(self.blocks, x)


class TestModels:
    target = jnp.roll(X, 1, axis=-1)

    def train(self, steps=6):
        with jlp.autocast(RECIPE):
            model = Model(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, overwrite_with_gradient(optax.adam(3e-3)), wrt=nnx.Param)

            @nnx.jit
            def step(model, optimizer):
                loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(X) - self.target) ** 2))(model)
                optimizer.update(model, gradients)
                return loss

            return model, [float(step(model, optimizer)) for _ in range(steps)]

    def test_layers_stacked_by_vmap_keep_their_own_states(self):
        model, losses = self.train()
        assert losses[-1] < losses[1] < losses[0] * 1.5
        state = state_of(model.blocks.layer)
        assert state["input_amax_history"].shape == (3, 3)
        assert np.all(state["kernel_amax_history"] > 0)
        assert len(set(state["output_grad_scale"].ravel().tolist())) == 3

    def test_an_unused_layer_stays_usable(self):
        model, _ = self.train(2)
        with jlp.autocast(RECIPE):
            y = model.unused(X)
            fresh = made(lambda: Model(nnx.Rngs(0))).unused
            fresh.kernel[...], fresh.bias[...] = model.unused.kernel[...], model.unused.bias[...]
            assert_same_bytes(y, fresh(X))

    def test_orbax_round_trip(self, tmp_path):
        model, _ = self.train(2)
        pure = nnx.to_pure_dict(nnx.state(model))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "model", pure)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "model", jax.eval_shape(lambda: pure))
        other = made(lambda: Model(nnx.Rngs(1)))
        state = nnx.state(other)
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(other, state)
        with jlp.autocast(RECIPE):
            assert_same_bytes(other(X), model(X))
        assert_same_bytes(state_of(other.blocks.layer), state_of(model.blocks.layer))


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral"])
def test_quantized_kernels_have_the_scale_of_the_state(name):
    layer = made(LAYERS[name])
    layer._overwrite_with_gradient["kernel_amax_history"][...] = jnp.asarray([2.0, 3.0, 0.5])
    with jlp.autocast(RECIPE):
        expected = nnx.value_and_grad(total)(layer, X)
        with jlp.nnx.quantized_kernels(layer):
            scale = layer._quantized_kernel().rowwise.scale
            assert scale == 1 / (np.float32(448) / np.float32(3))
            reused = nnx.value_and_grad(total)(layer, X)
    assert_same_bytes(jax.tree.leaves(reused), jax.tree.leaves(expected))


def test_intermediates_are_captured_beside_a_state():
    layer = made()
    with jlp.autocast(RECIPE):
        y, _ = nnx.capture(layer, nnx.Intermediate)(X)
        assert_same_bytes(y, layer(X))
