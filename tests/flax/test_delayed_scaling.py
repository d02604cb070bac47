"""Delayed scaling in Linen and NNX: states beside the parameters, combined by max wherever a layer is used again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.delayed_scaling import OVERWRITE_WITH_GRADIENT, combined_by_max, overwrite_with_gradient
from tests.flax.libraries import LIBRARIES
from tests.helpers import assert_same_bytes, random_array

pytestmark = pytest.mark.sampled(5)

RECIPE = jlp.DelayedScaling(amax_history_len=3)
X = random_array((16, 32)).astype(jnp.float32)  # 3 * X is exact
AMAX = float(jnp.abs(X).max())
# class, positional and keyword arguments
LAYERS = {
    "linear": ("Linear", (32, 16), {}),
    "general": ("LinearGeneral", (32, (4, 4)), {}),
    "einsum": ("Einsum", ("td,df->tf", (32, 16), (16,)), {}),
}
OF_NNX = {"linear float32 result": ("Linear", (32, 16), {"preferred_element_type": "float32"})}
ALL = LAYERS | OF_NNX
CASES = [("linen", name) for name in LAYERS] + [("nnx", name) for name in ALL]
each_layer = pytest.mark.parametrize(("library", "name"), CASES, ids=["-".join(case) for case in CASES])


def made(library, name, within=True):
    kind, args, options = ALL[name]
    with jlp.autocast(RECIPE, enabled=within):
        return LIBRARIES[library].model(LIBRARIES[library].maker(kind, *args, **options), X)


def total(y):
    return y.astype(jnp.float32).sum()


@jax.jit
def of_linear(kernel, state):
    """Gradients of what each layer computes."""

    def loss(kernel, state):
        return (jlp.linear(X, kernel, recipe=RECIPE, state=state)[0] ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(kernel, state)


def several(library):
    """A model of all kinds of layers."""

    def call(model, x):
        return model.linear(x) + model.general(x).reshape(-1, 16) + model.einsum(x)

    return library.composed(call, **{name: library.maker(kind, *args) for name, (kind, args, _) in LAYERS.items()})


class TestStates:
    def test_are_made_within_the_scope_beside_the_parameters(self, library):
        plain = library.initial(several(library), X).compile()(jax.random.key(0))
        with jlp.autocast(RECIPE):
            made = library.initial(several(library), X).compile()(jax.random.key(0))
        for name in LAYERS:
            assert set(plain[name]) == {"kernel", "bias"}
            assert_same_bytes(made[name].pop(OVERWRITE_WITH_GRADIENT), jlp.delayed_scaling.init_state(RECIPE))
        assert_same_bytes(made, plain)

    def test_do_not_matter_without_the_recipe(self, library):
        with jlp.autocast(RECIPE):
            having = library.model(several(library), X)
        assert_same_bytes(having(X), library.model(several(library), X)(X))


@each_layer
class TestLayers:
    def test_a_step_is_linears(self, library, name):
        model = made(library, name)
        state = model.tree[OVERWRITE_WITH_GRADIENT]
        state |= {"input_amax_history": jnp.asarray([AMAX, 0, 0]), "kernel_amax_history": jnp.ones(3)}
        model.tree["bias"] *= 0
        with jlp.autocast(RECIPE):
            gradients = model.gradients(lambda y: (y**2).sum(), X)
        dw, new = of_linear(model.tree["kernel"].reshape(32, 16), state)
        assert_same_bytes(gradients["kernel"].reshape(32, 16), dw)
        assert_same_bytes(gradients[OVERWRITE_WITH_GRADIENT], new)

    def test_a_missing_state_names_the_remedy(self, library, name):
        remedies = {"linen": r"initialise the model within autocast\(recipe\)", "nnx": "add_delayed_scaling"}
        model = made(library, name, within=False)
        with jlp.autocast(RECIPE), pytest.raises(ValueError, match=remedies[library]):
            model(X)

    def test_another_history_length_names_the_remedy(self, library, name):
        model = made(library, name)
        with jlp.autocast(jlp.DelayedScaling(amax_history_len=8)), pytest.raises(ValueError, match="make it anew"):
            model(X)


@pytest.mark.parametrize("name", ["linear", "general"])
def test_kernels_quantised_once_have_the_scale_of_the_state(library, name):
    model = made(library.name, name)
    model.tree[OVERWRITE_WITH_GRADIENT]["kernel_amax_history"] = jnp.asarray([2.0, 3.0, 0.5])
    with jlp.autocast(RECIPE):
        assert_same_bytes(model.quantized_once(X).run(X), model.run(X))


HEADS = {  # of two, of which only the first gets a gradient
    "not used": lambda model, x: model.a(x),
    "without a gradient": lambda model, x: model.a(x) + jax.lax.stop_gradient(model.b(x)),
}


@pytest.mark.parametrize("call", HEADS.values(), ids=HEADS)
def test_a_head_that_gets_no_gradient_keeps_its_state(library, call):
    transformation = overwrite_with_gradient(optax.sgd(0.1))

    def step(model, tree):
        gradients = jax.grad(lambda tree: total(model.apply(tree, X)))(tree)
        return optax.apply_updates(tree, transformation.update(gradients, transformation.init(tree), tree)[0])

    with jlp.autocast(RECIPE):
        both, one = (
            library.model(library.composed(heads, **{name: library.maker("Linear", 32, 16) for name in "ab"}), X)
            for heads in (lambda model, x: model.a(x) + model.b(x), call)
        )
        before = jax.jit(functools.partial(step, both))(both.tree)
        after = jax.jit(functools.partial(step, one))(before)
    before, after = ({name: tree[name][OVERWRITE_WITH_GRADIENT] for name in "ab"} for tree in (before, after))
    assert after["a"]["input_amax_history"].tolist() == [AMAX, 0, AMAX]
    assert_same_bytes(after["b"], before["b"])
    assert before["b"]["input_amax_history"].tolist() == [AMAX, 0, 0]


SCALES = jnp.asarray([1.0, 3.0, 2.0])
USES = {  # of a layer, on 1, 3 and 2 times the input
    "plainly": lambda library, model, x: sum(model.layer(k * x) for k in (1, 3, 2)),
    "in Flax's remat": lambda library, model, x: sum(
        library.remat(lambda model, x: model.layer(x))(model, k * x) for k in (1, 3, 2)
    ),
    "in Flax's scan": lambda library, model, x: library.scanned_sum(
        lambda model, x: model.layer(x), model, SCALES[:, None, None] * x
    ),
    "in jax.checkpoint": lambda library, model, x: sum(
        jax.checkpoint(lambda x: model.layer(x))(k * x) for k in (1, 3, 2)
    ),
    "in jax.lax.scan": lambda library, model, x: jax.lax.scan(
        lambda sum_, k: (sum_ + model.layer(k * x), None), jnp.zeros((16, 32)), SCALES
    )[0],
}
OF_JAX = ("in jax.checkpoint", "in jax.lax.scan")


def using(library, use):
    """A model of one layer."""
    with jlp.autocast(RECIPE):
        make = library.maker("Linear", 32, 32)
        return library.model(library.composed(lambda model, x: use(library, model, x), layer=make), X)


class TestReuse:
    """The gradient of the result is 1 everywhere."""

    def check(self, model, gradients):
        new = gradients["layer"][OVERWRITE_WITH_GRADIENT]
        assert new["input_amax_history"].tolist() == [3 * AMAX, 0, 0]
        assert new["output_grad_amax_history"].tolist() == [1, 0, 0]
        assert new["kernel_amax_history"].tolist() == [jnp.abs(model.tree["layer"]["kernel"]).max(), 0, 0]
        assert [new[f"{name}_scale"].item() for name in ("input", "kernel", "output_grad")] == [1, 1, 1]

    @pytest.mark.parametrize("use", USES)
    def test_is_combined_by_max(self, library, use):
        model = using(library, USES[use])
        with jlp.autocast(RECIPE):
            if use in OF_JAX:
                said = r"(Dense|Linear): .*combined_by_max.*only once, use Flax's counterpart \(nnx?.scan"
                with pytest.raises(ValueError, match=said):
                    model.gradients(total, X)
            wrapped = use in OF_JAX or use != "plainly" and library.name == "linen"
            wrap = combined_by_max if wrapped else lambda loss: loss
            self.check(model, model.gradients(total, X, wrap=wrap))

    def test_over_calls_of_a_pure_function(self, library):
        model = using(library, lambda library, model, x: model.layer(x))
        with jlp.autocast(RECIPE):

            def loss(tree):
                calls = sum(total(model.apply(tree, k * X)) for k in (1, 3))
                return jax.lax.scan(lambda c, k: (c + total(model.apply(tree, k * X)), None), calls, SCALES[2:])[0]

            self.check(model, jax.jit(jax.grad(combined_by_max(loss)))(model.tree))

    def test_without_differentiation_nothing_is_refused(self, library):
        with jlp.autocast(RECIPE):
            assert_same_bytes(using(library, USES["in jax.checkpoint"])(X), using(library, USES["plainly"])(X))

    def test_over_microbatches(self, library):
        model = using(library, lambda library, model, x: model.layer(x))
        with jlp.autocast(RECIPE):
            gradient = jax.jit(jax.grad(lambda tree, x: total(model.apply(tree, x))))
            first, second, third = (gradient(model.tree, k * X) for k in (1, 3, 2))
        summed = jlp.delayed_scaling.add_gradients(jlp.delayed_scaling.add_gradients(first, second), third)
        self.check(model, summed)
        np.testing.assert_allclose(summed["layer"]["bias"], 3 * 16)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_layers_of_a_stack_have_states_of_their_own(library, remat):
    layer = library.maker("Linear", 32, 32)
    block = library.composed(lambda block, x: 0.5 * block.layer(block.layer(x)), layer=layer)
    with jlp.autocast(RECIPE):
        model = library.model(library.stack(block, 3, remat), X)
        new = model.gradients(lambda y: (y**2).sum(), X)["blocks"]["layer"][OVERWRITE_WITH_GRADIENT]
    assert new["input_amax_history"].shape == (3, 3)
    kernels = model.tree["blocks"]["layer"]["kernel"]
    np.testing.assert_array_equal(new["kernel_amax_history"][:, 0], jnp.abs(kernels).max(axis=(1, 2)))
    assert new["input_amax_history"][0, 0] >= AMAX
    for name in ("input", "output_grad"):
        assert len(set(new[f"{name}_amax_history"][:, 0].tolist())) == 3
