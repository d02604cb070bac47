"""The block of experts of Linen and NNX: its numbers, its router, what recipes make of it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.layers.subscripts import KernelAxes
from tests.flax.experts import EXPERTS, HIDDEN, WIDTH, K, X, block, compiled, made, total
from tests.flax.libraries import LIBRARIES, weighted
from tests.helpers import assert_same_bytes, often
from tests.layers.fused.layers import EXACT
from tests.moe.stack import RECIPES
from tests.products import kept

pytestmark = pytest.mark.sampled(5)

RouterConfig = jlp.moe.RouterConfig

FLOAT32 = {"dtype": jnp.float32}
# What surrounds the experts' products is the same code for both libraries: one of them often, both with --slow.
near_recipes = pytest.mark.parametrize(
    ("library", "name"),
    often([("nnx", "nvfp4")], list(itertools.product(LIBRARIES, ["nvfp4", "fp8_current", "int4_qat"])), 2),
)
nnx_often = pytest.mark.parametrize("library", often(["nnx"], list(LIBRARIES)))


def limited(gate, up):
    """A gated activation that is not a function of gate, times up."""
    return gate * (up.clip(-1, 1) + 1)


def by_hand(tree, x, k, gated, shared):
    """The block in float64, token by token; `gated`: True, False, or an activation of gate and up."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    x = np.asarray(x, np.float64).reshape(-1, WIDTH)

    def silu(v):
        return v / (1 + np.exp(-v))

    def product(rows, part):
        return rows @ part["kernel"] + part.get("bias", 0)

    def expert(parts, rows):
        up = product(rows, parts["up_proj"])
        hidden = silu(up)
        if gated:
            gate = product(rows, parts["gate_proj"])
            hidden = gated(gate, up) if callable(gated) else silu(gate) * up
        return product(hidden, parts["down_proj"])

    logits = product(x, tree["router"])
    y = expert(tree["shared_experts"], x) if shared else np.zeros_like(x)
    for token, row in enumerate(logits):
        chosen = np.argsort(-row, kind="stable")[:k]
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        weights = scores[chosen] / scores[chosen].sum() if k > 1 else scores[chosen]
        for e, weight in zip(chosen, weights, strict=True):
            y[token] += weight * expert(jax.tree.map(lambda leaf: leaf[e], tree["experts"]), x[token])
    return y


FORMS = [(*form, *rest) for form in ((8, 2), (4, 1), (3, 3)) for rest in itertools.product((0, 48), (True, False))]
BOTH = [(name, *form) for name in LIBRARIES for form in FORMS]
EITHER = [(list(LIBRARIES)[i % 2], *form) for i, form in enumerate(FORMS)]  # often, each form in one of the libraries


class TestNumbers:
    @pytest.mark.parametrize(("library", "experts", "k", "shared", "gated"), often(EITHER, BOTH, 5))
    def test_are_those_of_going_token_by_token(self, library, experts, k, shared, gated):
        x, options = X.astype(jnp.float32), {"shared_hidden_features": shared, "gated": gated}
        model = made(LIBRARIES[library], experts, k, **FLOAT32, **options)
        y, aux = compiled(model)(model.tree, x)
        expected = by_hand(model.tree, x, k, gated, bool(shared))
        np.testing.assert_allclose(np.asarray(y).reshape(-1, WIDTH), expected, atol=2e-6)
        assert y.shape == X.shape and aux.tape.shape == (8, 16, k)
        np.testing.assert_array_equal(aux.group_sizes, np.bincount(np.ravel(aux.tape), minlength=experts))

    @pytest.mark.slow
    @nnx_often
    def test_with_biases_and_an_activation_of_gate_and_up(self, library):
        options = {
            "use_bias": True,
            "routing": jlp.moe.RouterConfig(logit_bias=True),
            "activation": limited,
            "gated": "joint",
        }
        x, shared = X.astype(jnp.float32), {"shared_hidden_features": 48}
        model = made(LIBRARIES[library], 4, 2, **FLOAT32, **options, **shared)
        keys = iter(jax.random.split(jax.random.key(1), 20))
        tree = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), model.tree)
        y, _ = compiled(model)(tree, x)
        expected = by_hand(tree, x, 2, limited, True)
        np.testing.assert_allclose(np.asarray(y).reshape(-1, WIDTH), expected, atol=1e-5)

    @near_recipes
    def test_under_a_recipe_are_near(self, library, name):
        model = made(LIBRARIES[library], shared_hidden_features=32)
        tape = jnp.full((8, 16, K), -1, jnp.int32)
        _, aux = compiled(model)(model.tree, X, tape)
        expected, again = compiled(model)(model.tree, X, aux.tape)
        assert_same_bytes(again.tape, aux.tape)
        with jlp.autocast(RECIPES[name]):
            actual, _ = compiled(model)(model.tree, X, aux.tape)
        actual, expected = (np.asarray(y, np.float32) for y in (actual, expected))
        assert np.any(actual != expected)
        assert np.linalg.norm(actual - expected) < 0.35 * np.linalg.norm(expected)  # NVFP4's in three products

    def test_are_of_any_leading_axes(self, library):
        model = made(library)
        for shape in ((5, WIDTH), (2, 3, 4, WIDTH)):
            y, aux = jax.eval_shape(model.apply, model.tree, jnp.ones(shape))
            assert y.shape == shape and aux.tape.shape == (*shape[:-1], K)
        y, aux = compiled(model)(model.tree, jnp.ones(WIDTH))
        assert y.shape == (WIDTH,) and aux.tape.shape == (K,) and jnp.all(jnp.isfinite(y))

    @pytest.mark.parametrize(
        ("library", "name"),
        often(
            [("nnx", "bf16"), ("linen", "mxfp8"), ("nnx", "fp8_block"), ("linen", "int4_qat")],
            list(itertools.product(LIBRARIES, ["bf16", "mxfp8", "fp8_block", "int4_qat"])),
            2,
        ),
    )
    def test_of_a_token_do_not_depend_on_the_others(self, library, name):
        model = made(LIBRARIES[library], recipe=RECIPES[name], shared_hidden_features=32)
        mine, theirs = np.asarray([[0, 3], [2, 7], [7, 15]]).T
        mixed = 3 * np.asarray(X)[::-1]
        mixed[mine, theirs] = np.asarray(X)[mine, theirs]
        call = compiled(model)
        y, z = (np.asarray(call(model.tree, x)[0]) for x in (X, jnp.asarray(mixed)))
        assert_same_bytes(z[mine, theirs], y[mine, theirs])
        assert np.any(y != z)


class TestBothLibraries:
    @pytest.mark.parametrize("name", often(["nvfp4"], ["bf16", "nvfp4", "fp8_current", "int4_qat"]))
    def test_have_the_same_bits_and_gradients(self, name):
        options = {
            "shared_hidden_features": 32,
            "routing": RouterConfig(load_balance_coef=0.3),
            "recipe": RECIPES[name],
        }
        models = [made(library, **options) for library in LIBRARIES.values()]
        assert_same_bytes(*(model.tree for model in models))
        assert_same_bytes(*(model.run(X, loss=total) for model in models))

    def test_have_the_same_parameters(self):
        with jlp.autocast(jlp.NVFP4BlockScaling()):
            made = [
                library.initial(block(library, shared_hidden_features=48), X).out_info for library in LIBRARIES.values()
            ]
        assert made[0] == made[1]


class TestRouter:
    @near_recipes
    def test_is_float32_whatever_the_recipe(self, library, name):
        model = made(LIBRARIES[library], param_dtype=jnp.bfloat16)
        assert model.tree["router"]["kernel"].dtype == jnp.float32
        assert model.tree["experts"]["up_proj"]["kernel"].dtype == jnp.bfloat16
        expected = jax.jit(lambda tree: model.apply(tree, X)[1])(model.tree)
        with jlp.autocast(RECIPES[name]):
            aux = jax.jit(lambda tree: model.apply(tree, X)[1])(model.tree)
        assert_same_bytes(aux, expected)
        assert aux.load_balance_loss.dtype == jnp.float32

    @nnx_often
    def test_learns_from_one_choice_unless_its_weight_is_fixed(self, library):
        def slope(k, **options):
            model = made(LIBRARIES[library], k=k, **options)

            def loss(kernel):
                tree = model.tree | {"router": {"kernel": kernel}}
                return jnp.sum(model.apply(tree, X)[0].astype(jnp.float32) ** 2)

            return np.linalg.norm(jax.jit(jax.grad(loss))(model.tree["router"]["kernel"]))

        assert slope(1) > 1 and slope(2) > 1 and slope(1, routing=RouterConfig(normalize=True)) < 1e-3

    def test_its_loss_is_scaled_by_the_coefficient(self, library):
        def loss(coefficient):
            model = made(library, routing=RouterConfig(load_balance_coef=coefficient))
            return jax.jit(lambda tree: model.apply(tree, X)[1].load_balance_loss)(model.tree)

        np.testing.assert_allclose(100 * loss(0.01), loss(1.0), rtol=1e-6)
        assert 1 < loss(1.0) < EXPERTS


def separate_silu(x):
    """SiLU in float32: a block does not compute such an activation again, and calls its layers one by one."""
    return jax.nn.silu(x).astype(jnp.float32)


def step_of(model):
    """Output, aux and gradients, each operation rounded."""

    @functools.partial(jax.jit, compiler_options=EXACT)
    def run(tree, x):
        def loss(tree, x):
            output = model.apply(tree, x)
            return total(output), output

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(tree, x)

    return run(model.tree, X)


class TestSaved:
    """What is kept of the experts' hidden layer."""

    @pytest.mark.slow
    @pytest.mark.parametrize("saved", ["quantized", "recompute"])
    @pytest.mark.parametrize("gated", [True, False])
    @near_recipes
    def test_changes_no_bits_of_outputs_and_parameters_gradients(self, library, name, gated, saved):
        options = {"recipe": RECIPES[name], "gated": gated, "shared_hidden_features": 32}
        made_with = functools.partial(made, LIBRARIES[library], **options)
        (_, output), (tree, x) = step_of(made_with(saved=saved))
        one = jnp.ones((), jnp.bfloat16)
        with_array = lambda x: jax.nn.silu(x) * one  # noqa: E731
        (_, separate_output), (separate_tree, separate_x) = step_of(made_with(activation=with_array))
        assert_same_bytes(output, separate_output)
        assert_same_bytes(tree["experts"], separate_tree["experts"])
        difference = jnp.linalg.norm((x - separate_x).astype(jnp.float32))
        assert difference <= 0.01 * jnp.linalg.norm(separate_x.astype(jnp.float32))

    @pytest.mark.parametrize("name", ["nvfp4", "bf16"])
    def test_keeps_less_and_less(self, library, name):
        """Of the rows of tokens: x's codes in "recompute" are the only ones left that have the hidden layer's shape."""

        def kept_by(saved):
            model = made(library, recipe=RECIPES[name], saved=saved)
            rows = X.size // WIDTH * K
            arrays = kept(lambda tree: model.apply(tree, X)[0], model.tree)
            return sum(a.size * a.dtype.itemsize for a in arrays if a.shape == (rows, HIDDEN))

        found = [kept_by(saved) for saved in ("quantized", "8bit", "recompute")]
        elements = X.size // WIDTH * K * HIDDEN
        assert found == ([4 * elements, 2 * elements, elements] if name == "nvfp4" else [4 * elements] * 2 + [0])

    @pytest.mark.slow
    def test_an_activation_with_parameters_still_learns(self):
        class Scaled(nnx.Module):
            def __init__(self):
                self.scale = nnx.Param(jnp.ones(()))

            def __call__(self, x):
                return jax.nn.silu(x) * self.scale[...].astype(x.dtype)

        moe = jlp.nnx.MoE(4, WIDTH, HIDDEN, top_k=2, activation=Scaled(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        with jlp.autocast(RECIPES["nvfp4"]):
            found = nnx.grad(lambda moe: total(moe(X)))(moe)
        assert float(found["experts"]["activation"]["scale"][...]) != 0

    @pytest.mark.parametrize("activation", [separate_silu, lambda x: x @ jnp.ones((HIDDEN, HIDDEN), x.dtype)])
    def test_other_activations_are_computed_between_the_layers(self, library, activation):
        model = made(library, activation=activation, recipe=RECIPES["nvfp4"])
        assert bool(jnp.isfinite(compiled(model)(model.tree, X)[0]).all())


PARTS = [f"{where}/{part}" for where in ("experts", "shared_experts") for part in ("down_proj", "gate_proj", "up_proj")]


class TestPolicy:
    def test_explain_lists_experts_and_leaves_the_router(self, library):
        model = made(library, shared_hidden_features=32)
        for recipe, fmt in ((jlp.Int4QAT(group_size=32), jlp.Int4(32)), (jlp.NVFP4BlockScaling(), jlp.NVFP4((16, 16)))):
            found = model.explain(recipe, X)
            assert found.formats == {"router": None} | dict.fromkeys(PARTS, fmt)
            assert {applied.axes for applied in found.layers if applied.path.startswith("experts")} == {
                KernelAxes.in_front(1, 1, 3)
            }

    @pytest.mark.parametrize(
        ("library", "name"),
        often(
            [("linen", "int4_qat"), ("nnx", "nvfp4_qat")],
            list(itertools.product(LIBRARIES, ["int4_qat", "nvfp4_qat"])),
            2,
        ),
    )
    def test_what_was_trained_is_served_with_the_same_bits(self, library, name):
        model = made(LIBRARIES[library], shared_hidden_features=32)
        served = model.served(RECIPES[name], X)
        for part, shape in (("up_proj", (EXPERTS, WIDTH, HIDDEN)), ("down_proj", (EXPERTS, HIDDEN, WIDTH))):
            kernel = served.kernel("experts", part)
            assert isinstance(kernel, jlp.QuantizedArray) and kernel.shape == shape
        assert not isinstance(served.kernel("router"), jlp.QuantizedArray)
        assert served.explain(None, X).formats["experts/up_proj"] == RECIPES[name].weight_format
        with jlp.autocast(RECIPES[name]):
            expected = compiled(model)(model.tree, X)
        assert_same_bytes(compiled(served)(served.tree, X), expected)

    def test_a_pattern_leaves_experts_out(self, library):
        model = made(library)
        plain = model.program(X, loss=lambda out: weighted(out[0])).as_text()
        for excluded, same in (("experts/", True), ("router", False)):
            with jlp.autocast(jlp.Int4QAT(group_size=32, exclude=(excluded,))):
                assert (model.program(X, loss=lambda out: weighted(out[0])).as_text() == plain) == same


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 9}, ValueError, "MoE: top_k=9 of num_experts=8"),
        ({"k": 0}, ValueError, "top_k=0"),
        ({"routing": "max"}, TypeError, "MoE: routing='max'; needs a jaxlowprec.moe.RouterConfig"),
        ({"routing": RouterConfig(groups=3)}, ValueError, "MoE: 8 experts in groups=3"),
        ({"gated": "silu"}, TypeError, "gated='silu'"),
        ({"saved": "all"}, ValueError, "MoE: saved='all'"),
        ({"recipe": "nvfp4"}, TypeError, "recipe='nvfp4'"),
    ],
)
def test_a_wrong_argument_is_named(library, options, error, message):
    with pytest.raises(error, match=message):
        made(library, **options)
