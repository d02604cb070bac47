"""Layers of Linen and NNX: Flax's own programs without a recipe, and with the same parameters under one."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlowprec as jlp
from jaxlowprec.recipes import silence
from tests.flax.libraries import LIBRARIES, weights_of
from tests.helpers import assert_same_bytes, often, random_array

pytestmark = pytest.mark.sampled(5)

FULL = jlp.NVFP4BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)
BF16 = {"dtype": jnp.bfloat16}
# class, positional and keyword arguments, shape of the input
LAYERS = {
    "linear": ("Linear", (32, 48), {}, (4, 8, 32)),
    "linear bf16": ("Linear", (32, 48), BF16, (16, 32)),
    "linear bf16 parameters": ("Linear", (32, 48), {"param_dtype": jnp.bfloat16, "use_bias": False}, (16, 32)),
    "general": ("LinearGeneral", (32, (4, 12)), BF16, (4, 8, 32)),
    "general two axes": ("LinearGeneral", ((4, 12), 32), {"axis": (-2, -1)}, (4, 8, 4, 12)),
    "general batched": ("LinearGeneral", (32, 24), {"axis": 2, "batch_axis": {0: 3}}, (3, 16, 32)),
    "einsum": ("Einsum", ("btd,dhk->bthk", (32, 4, 12), (4, 12)), {}, (4, 8, 32)),
    "einsum out": ("Einsum", ("bthk,hkd->btd", (4, 12, 32), (32,)), BF16, (2, 8, 4, 12)),
    "einsum without a bias": ("Einsum", ("bthk,hkd->btd", (4, 12, 32)), BF16, (2, 8, 4, 12)),
    "einsum batched": ("Einsum", ("bthk,hkd->bthd", (4, 12, 16), (4, 16)), {}, (2, 8, 4, 12)),
}
OF_NNX = {"linear float32 result": ("Linear", (32, 48), BF16 | {"preferred_element_type": "float32"}, (16, 32))}
ALL = LAYERS | OF_NNX
CASES = [("linen", name) for name in LAYERS] + [("nnx", name) for name in ALL]
each_layer = pytest.mark.parametrize(("library", "name"), CASES, ids=["-".join(case) for case in CASES])


def made(library, name, **options):
    """The model of a layer, and inputs."""
    kind, args, own, shape = ALL[name]
    x, library = random_array(shape), LIBRARIES[library]
    return library.model(library.maker(kind, *args, **own | options), x), x


def flaxs(library, name, seed=0):
    kind, args, options, shape = ALL[name]
    library = LIBRARIES[library]
    x = random_array(shape)
    return library.model(library.maker(kind, *args, of=library.flax, **options), x, seed=seed), x


@functools.cache
def under_the_recipe(library, name):
    """The layer's output and gradients, for two tests."""
    model, x = made(library, name, recipe=FULL)
    return model.run(x)


@pytest.fixture(autouse=True, scope="module")
def forget_results():
    yield
    under_the_recipe.cache_clear()


@each_layer
class TestLayers:
    def test_their_parameters_are_made_by_flaxs_program(self, library, name):
        kind, args, options, shape = ALL[name]
        library, x = LIBRARIES[library], random_array(shape)
        expected = library.initial(library.maker(kind, *args, of=library.flax, **options), x)
        for recipe in (None, FULL):
            with jlp.autocast(recipe, enabled=recipe is not None):
                actual = library.initial(library.maker(kind, *args, **options), x)
            assert actual.out_info == expected.out_info
            assert actual.as_text() == expected.as_text()

    def test_without_a_recipe_they_are_flaxs_program(self, library, name):
        (flax, x), (ours, _), (without, _) = flaxs(library, name), made(library, name), made(library, name, recipe=None)
        expected = flax.program(x).as_text()
        assert ours.program(x).as_text() == expected
        with jlp.autocast(FULL):
            assert without.program(x).as_text() == expected
            assert ours.program(x).as_text() != expected

    def test_under_a_recipe_they_approximate_flax(self, library, name):
        flax, x = flaxs(library, name)
        actual, expected = under_the_recipe(library, name), flax.run(x)
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
            a, e = (np.asarray(v).astype(np.float64) for v in (a, e))
            assert np.linalg.norm(a - e) < 0.3 * np.linalg.norm(e)  # NVFP4's error, numerics.md 11
        assert np.any(np.asarray(actual[0]) != np.asarray(expected[0]))

    def test_the_contexts_recipe_is_that_of_an_argument(self, library, name):
        own, x = made(library, name, recipe=FULL)
        with jlp.autocast(FULL):
            assert made(library, name)[0].program(x).as_text() == own.program(x).as_text()

    def test_a_checkpoint_moves_both_ways(self, library, name):
        flax, ours = flaxs(library, name, seed=1)[0], made(library, name, recipe=FULL)[0]
        for source, target in ((flax, ours), (ours, flax)):
            moved = LIBRARIES[library].moved(source, target)
            assert jax.tree.structure(moved.tree) == jax.tree.structure(target.tree)
            assert_same_bytes(moved.tree, source.tree)


ONCE = [case for case in CASES if not case[1].startswith("einsum")]


@pytest.mark.parametrize(
    ("library", "name"),
    often([(library, name) for library in LIBRARIES for name in ("linear bf16", "general batched")], ONCE, 2),
)
def test_a_kernel_is_quantised_once_for_many_calls(library, name):
    model, x = made(library, name, recipe=FULL)
    once, expected = model.quantized_once(x), under_the_recipe(library, name)
    program = once.program(x).compile()
    assert_same_bytes(program(model.tree, x), expected)
    changed = model.tree | {"kernel": 2 * np.asarray(model.tree["kernel"])}
    assert_same_bytes(program(changed, x)[0], expected[0])


class TestMasterWeight:
    """A float32 kernel beside bfloat16 activations: its gradient is rounded once, to float32."""

    def is_rounded(self, gradient):
        assert gradient.dtype == jnp.float32
        gradient = np.asarray(gradient)
        return np.mean(gradient == gradient.astype(jnp.bfloat16))

    def test_gets_a_gradient_that_is_not_rounded_to_bfloat16(self, library):
        y, gradients, _ = under_the_recipe(library.name, "linear bf16")
        assert y.dtype == jnp.bfloat16
        assert self.is_rounded(gradients["kernel"]) < 0.1

    def test_in_flaxs_layer_too_with_keep_kernel_dtype(self, library):
        def gradient(**options):
            make = library.maker("Linear", 32, 48, of=library.flax, dot_general=jlp.dot_general, **BF16, **options)
            with jlp.autocast(FULL):
                y, gradients, _ = library.model(make, x).run(x)
            assert y.dtype == jnp.bfloat16
            return gradients["kernel"]

        x = random_array((16, 32))
        kept = gradient(promote_dtype=library.ours.keep_kernel_dtype)
        assert self.is_rounded(kept) < 0.1
        assert_same_bytes(kept, under_the_recipe(library.name, "linear bf16")[1]["kernel"])
        assert self.is_rounded(gradient()) == 1  # what it is for


class TestRandomStream:
    x = random_array((16, 32))

    def results(self, library, recipe):
        """Of a function of a key: output and gradients."""
        model = library.model(library.maker("Linear", 32, 48, recipe=recipe, **BF16), self.x, sr=True)

        @jax.jit
        def results(key):
            y, pullback = jax.vjp(lambda tree, x: model.apply(tree, x, sr=key), model.tree, self.x)
            return y, *pullback(weights_of(y))

        return results

    def test_is_optional_and_decides_the_bits_where_given(self, library):
        results = self.results(library, FULL)
        (y, *a), (z, *b), (_, *again) = (jax.device_get(results(jax.random.key(i))) for i in (0, 1, 0))
        assert np.any(a[0]["kernel"] != b[0]["kernel"]) and np.any(a[1] != b[1])
        assert_same_bytes(again, a)
        keyless = under_the_recipe(library.name, "linear bf16")
        assert_same_bytes((y, z), (keyless[0], keyless[0]))
        model, x = made(library.name, "linear bf16", recipe=FULL)
        assert_same_bytes(model.run(x), keyless)

    def test_is_not_used_where_nothing_is_rounded_stochastically(self, library):
        model = library.model(library.maker("Linear", 32, 48, recipe=PLAIN), self.x, sr=True)
        keys = [jax.random.key(i) for i in (0, 1)]
        keyed = [jax.jit(jax.grad(lambda x: model.apply(model.tree, x, sr=k).sum())).lower(self.x) for k in keys]
        assert keyed[0].as_text() == keyed[1].as_text()


def block(library):
    """A residual pair of layers."""
    return library.composed(
        lambda block, x: x + block.down(jax.nn.gelu(block.up(x))),
        up=library.maker("Linear", 32, 64, **BF16),
        down=library.maker("LinearGeneral", 64, 32, **BF16),
    )


def model_of(library, scan, remat):
    make = block(library)
    if scan:
        return library.stack(make, 3, remat)
    call = library.remat(lambda block, x: block(x)) if remat else lambda block, x: block(x)
    return library.composed(lambda model, x: call(model.last, call(model.first, x)), first=make, last=make)


class TestModels:
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(jnp.bfloat16)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("scan", "remat"),
        often([(False, False), (True, True)], list(itertools.product([False, True], repeat=2)), 2),
        ids=["", "remat", "scan", "scan remat"],
    )
    def test_training_lowers_the_loss_and_keeps_types(self, library, scan, remat):
        model, target = library.model(model_of(library, scan, remat), self.x), -self.x
        with jlp.autocast(FULL):
            tree, losses = model.trained(optax.adam(3e-3), self.x, target, steps=8)
        assert losses[-1] < 0.9 * losses[0]
        assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, model.tree)
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype("float32")}

    @pytest.mark.slow
    def test_remat_does_not_change_gradients(self, library):
        with jlp.autocast(FULL):
            plain, remat = (library.model(model_of(library, False, r), self.x).run(self.x) for r in (False, True))
        assert_same_bytes(remat, plain)


def doubled(*operands, **options):
    """A product of nobody else."""
    return 2 * (jnp.einsum if isinstance(operands[0], str) else jax.lax.dot_general)(*operands, **options)


@pytest.mark.parametrize(
    ("library", "kind", "name"),
    [
        *itertools.product(["linen"], ["Linear", "LinearGeneral"], ["dot_general", "dot_general_cls"]),
        ("nnx", "Linear", "dot_general"),
        ("nnx", "LinearGeneral", "dot_general"),
        ("nnx", "LinearGeneral", "dot_general_cls"),
        ("nnx", "Einsum", "einsum_op"),
    ],
)
class TestOwnProducts:
    """Layers that were given a function for their product."""

    x = random_array((8, 32))

    def made(self, library, kind, name, of=None, **options):
        library, args = LIBRARIES[library], ("td,df->tf", (32, 16)) if kind == "Einsum" else (32, 16)
        product = (lambda: doubled) if name == "dot_general_cls" else doubled
        return library.model(library.maker(kind, *args, of=of or library.ours, **{name: product}, **options), self.x)

    def test_are_computed_as_flaxs_under_the_scopes_recipe(self, library, kind, name, monkeypatch):
        monkeypatch.setattr(silence, "_said", set())
        flax = self.made(library, kind, name, of=LIBRARIES[library].flax)
        with warnings.catch_warnings(record=True) as found, jlp.autocast(jlp.DelayedScaling()):
            warnings.simplefilter("always")
            ours = self.made(library, kind, name)
            for _ in range(2):
                assert_same_bytes(ours(self.x), flax(self.x))
        assert jax.tree.structure(ours.tree) == jax.tree.structure(flax.tree)  # no state
        said = f"{name}= is set, so the layer computes as Flax's and does not follow the recipe"
        assert [str(w.message) for w in found] == [f"{type(ours.module).__name__}: {said}"]

    def test_would_silently_win_over_a_recipe_of_the_layer(self, library, kind, name):
        said = f"{name}= is set, so the recipe .* would be ignored; drop it, or pass recipe=None"
        with pytest.raises(ValueError, match=said):
            self.made(library, kind, name, recipe=FULL)(self.x)

    def test_are_explained(self, library, kind, name):
        (layer,) = self.made(library, kind, name).explain(FULL, self.x).layers
        assert (layer.note, layer.roles.quantizes_weight) == (f"{name}= is set", False)


class TestErrors:
    x = jnp.ones((8, 32))

    @pytest.mark.parametrize("kind", ["Linear", "LinearGeneral", "Einsum"])
    def test_a_recipe_that_is_none(self, library, kind):
        args = ("td,df->tf", (32, 16)) if kind == "Einsum" else (32, 16)
        said = type(library.model(library.maker(kind, *args), self.x).module).__name__
        with pytest.raises(TypeError, match=f"{said}: recipe='nvfp4'"):
            library.model(library.maker(kind, *args, recipe="nvfp4"), self.x)

    def test_kernels_quantised_for_another_recipe(self, library):
        model = library.model(library.maker("Linear", 32, 16), self.x)
        with jlp.autocast(FULL):
            once = model.quantized_once(self.x)
        with (
            jlp.autocast(jlp.NVFP4BlockScaling(disable_2d_quantization=True)),
            pytest.raises(ValueError, match="quantise it again under this recipe"),
        ):
            once(self.x)

    def test_contracted_axes_are_taken_in_flaxs_order_and_must_exist(self, library):
        x = random_array((4, 8, 8))

        def layer(axis, made_for):
            return library.model(library.maker("LinearGeneral", (8, 8), 16, axis=axis, recipe=FULL), made_for)

        assert layer((-2, -1), x).program(x).as_text() == layer((-1, -2), x).program(x).as_text()
        with pytest.raises(ValueError, match="General: axis=3 is out of range for an array of 3 dimensions"):
            layer((-2, 3), x[..., None, :] * jnp.ones((8, 1)))(x)
