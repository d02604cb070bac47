"""Delayed scaling in Linen: a collection beside the parameters, combined by max wherever a layer is used again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxlowprec as jlp
from jaxlowprec.linears.delayed_scaling import OVERWRITE_WITH_GRADIENT, combined_by_max
from tests.helpers import assert_same_bytes, random_array

RECIPE = jlp.DelayedScaling(amax_history_len=3)
X = random_array((16, 32)).astype(jnp.float32)  # 3 * X is exact
AMAX = float(jnp.abs(X).max())
LAYERS = {
    "Dense": lambda: jlp.linen.Dense(16),
    "DenseGeneral": lambda: jlp.linen.DenseGeneral((4, 4)),
    "Einsum": lambda: jlp.linen.Einsum((32, 16), "td,df->tf"),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def new_states(model, variables, x=X, wrap=lambda loss: loss):
    """What the gradient says of the states."""
    with jlp.autocast(RECIPE):
        gradients = jax.jit(jax.grad(wrap(lambda v: (model.apply(v, x).astype(jnp.float32) ** 2).sum())))(variables)
    return gradients[OVERWRITE_WITH_GRADIENT]


def init(model, x=X):
    with jlp.autocast(RECIPE):
        return model.init(jax.random.key(0), x)


@each_layer
class TestLayers:
    def test_init_makes_the_collection_beside_the_parameters(self, make):
        variables = init(make())
        assert_same_bytes(variables["params"], make().init(jax.random.key(0), X)["params"])
        assert_same_bytes(variables[OVERWRITE_WITH_GRADIENT], jlp.delayed_scaling.init_state(RECIPE))
        assert set(make().init(jax.random.key(0), X)) == {"params"}

    def test_a_step_is_linears(self, make):
        variables = init(make())
        kernel, state = variables["params"]["kernel"], variables[OVERWRITE_WITH_GRADIENT]
        state = state | {"input_amax_history": jnp.asarray([AMAX, 0, 0]), "kernel_amax_history": jnp.ones(3)}
        variables = variables | {OVERWRITE_WITH_GRADIENT: state}

        def loss(kernel, state):
            y, _ = jlp.linear(X, kernel.reshape(32, 16), recipe=RECIPE, state=state)
            return (y**2).sum()

        with jlp.autocast(RECIPE):
            gradients = jax.grad(lambda v: (make().apply(v, X) ** 2).sum())(variables)
        dw, new = jax.grad(loss, argnums=(0, 1))(kernel, state)
        assert_same_bytes(gradients["params"]["kernel"], dw)
        assert_same_bytes(gradients[OVERWRITE_WITH_GRADIENT], new)

    def test_a_missing_collection_names_the_remedy(self, make):
        variables = make().init(jax.random.key(0), X)
        with jlp.autocast(RECIPE), pytest.raises(ValueError, match=r"initialise the model within autocast\(recipe\)"):
            make().apply(variables, X)

    def test_another_history_length_names_the_remedy(self, make):
        variables = init(make())
        with jlp.autocast(jlp.DelayedScaling(amax_history_len=8)), pytest.raises(ValueError, match="make it anew"):
            make().apply(variables, X)

    def test_without_the_recipe_the_collection_does_not_matter(self, make):
        variables = init(make())
        assert_same_bytes(make().apply(variables, X), make().apply({"params": variables["params"]}, X))


class Twice(nn.Module):
    """A layer that is used three times, with 1, 3 and 2 times the input."""

    wrap: str = "plain"

    def setup(self):
        self.layer = jlp.linen.Dense(32)

    def __call__(self, x):
        def use(module, x):
            return module.layer(x)

        if self.wrap == "remat":
            use = nn.remat(use)
        if self.wrap == "jax.checkpoint":
            return sum(jax.checkpoint(lambda x: self.layer(x))(k * x) for k in (1, 3, 2))
        if self.wrap == "jax.lax.scan":
            body = lambda total, k: (total + self.layer(k * x), None)  # noqa: E731
            return jax.lax.scan(body, jnp.zeros((16, 32)), jnp.asarray([1.0, 3.0, 2.0]))[0]
        if self.wrap == "scan":

            def body(module, total, k):
                return total + module.layer(k * x), None

            broadcast = ["params", OVERWRITE_WITH_GRADIENT]
            scan = nn.scan(body, variable_broadcast=broadcast, split_rngs={"params": False})
            return scan(self, jnp.zeros((16, 32)), jnp.asarray([1.0, 3.0, 2.0]))[0]
        return sum(use(self, k * x) for k in (1, 3, 2))


class TestReuse:
    def check(self, new):
        layer = new["layer"]
        assert layer["input_amax_history"].tolist() == [3 * AMAX, 0, 0]
        assert layer["kernel_amax_history"][0] == np.abs(init(Twice())["params"]["layer"]["kernel"]).max()
        # dy is the same for all three: a sum would be three times that of one use
        with jlp.autocast(RECIPE):
            y, pullback = jax.vjp(lambda v: Twice().apply(v, X), init(Twice()))
        assert layer["output_grad_amax_history"][0] == jnp.abs(2 * y).max()
        assert pullback

    def test_of_a_layer_within_one_apply(self):
        self.check(new_states(Twice(), init(Twice())))

    @pytest.mark.parametrize("wrap", ["remat", "scan", "jax.checkpoint", "jax.lax.scan"])
    def test_within_transformations(self, wrap):
        self.check(new_states(Twice(wrap), init(Twice()), wrap=combined_by_max))

    @pytest.mark.parametrize("wrap", ["jax.checkpoint", "jax.lax.scan"])
    def test_within_jaxs_transformations_raises_the_remedy(self, wrap):
        with pytest.raises(ValueError, match=r"Dense: .*use Flax's counterpart \(nn.scan.*combined_by_max"):
            new_states(Twice(wrap), init(Twice()))

    def test_without_differentiation_nothing_is_refused(self):
        variables = init(Twice())
        with jlp.autocast(RECIPE):
            y = Twice("jax.checkpoint").apply(variables, X)
            assert_same_bytes(y, Twice().apply(variables, X))

    def test_over_several_applies(self):
        model, variables = jlp.linen.Dense(16), init(jlp.linen.Dense(16))

        def loss(v):
            return sum(model.apply(v, k * X).sum() for k in (1, 3, 2))

        with jlp.autocast(RECIPE):
            new = jax.jit(jax.grad(combined_by_max(loss)))(variables)[OVERWRITE_WITH_GRADIENT]
        assert new["input_amax_history"].tolist() == [3 * AMAX, 0, 0]
        assert new["output_grad_amax_history"].tolist() == [1, 0, 0]


class Stack(nn.Module):
    """Layers of their own, by nn.scan."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        axes = {"params": 0, OVERWRITE_WITH_GRADIENT: 0, "quantized": 0}
        return nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)()(x, None)[0]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        layer = jlp.linen.Dense(32)
        return 0.5 * layer(layer(x)), None


class TestScannedLayers:
    @pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
    def test_have_states_of_their_own(self, remat):
        variables = init(Stack(remat))
        (state,) = jax.tree.leaves(
            new_states(Stack(remat), variables), is_leaf=lambda v: "input_scale" in getattr(v, "keys", tuple)()
        )
        kernels = jax.tree.leaves(variables["params"])[-1]
        assert state["input_amax_history"].shape == (3, 3)
        np.testing.assert_array_equal(state["kernel_amax_history"][:, 0], jnp.abs(kernels).max(axis=(1, 2)))
        assert state["input_amax_history"][0, 0] >= AMAX
        assert len(set(state["input_amax_history"][:, 0].tolist())) == 3

    def test_kernels_quantised_once_have_the_scales_of_their_states(self):
        variables = init(Stack())
        variables = variables | {OVERWRITE_WITH_GRADIENT: new_states(Stack(), variables)}
        with jlp.autocast(RECIPE):
            y, quantized = Stack().apply(variables, X, mutable="quantized")
            assert_same_bytes(Stack().apply(variables | quantized, X), y)
            assert_same_bytes(Stack().apply(variables, X), y)


def test_decoding_in_a_scan_carries_the_collection():
    """`apply` returns what is mutable: with the collection among it, the carry keeps what `init` made."""
    with jlp.autocast(RECIPE):
        model = jlp.linen.convert(nn.MultiHeadDotProductAttention(2, decode=True))
        variables = model.init(jax.random.key(0), X[None])
        params = variables["params"]
        carry = {name: value for name, value in variables.items() if name != "params"}

        def body(carry, x):
            y, carry = model.apply({"params": params, **carry}, x[None, None], mutable=list(carry))
            return carry, y

        last, y = jax.lax.scan(body, carry, X)
    assert y.shape == (16, 1, 1, 32) and last["cache"]["cache_index"] == 16
    assert_same_bytes(last[OVERWRITE_WITH_GRADIENT], variables[OVERWRITE_WITH_GRADIENT])
