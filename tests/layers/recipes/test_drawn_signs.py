"""Layers whose wgrad operands are rotated with signs that are drawn anew: from the layer's key, or from the input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import Role, Roles
from jaxlowprec.ops.quantize.random_bits import keyless_seed, keyless_words
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import relative_error, weights
from tests.sharding.meshes import mesh_of, place

NVFP4 = jlp.NVFP4()
KEY, OTHER = jax.random.key(3), jax.random.key(4)


@dataclasses.dataclass(frozen=True)
class Drawn(jlp.Recipe):
    """NVFP4's recipe with drawn signs, or others."""

    size: int = 16
    rounding: str = "nearest"
    backward_override: str | None = None
    signs: str | tuple[int, ...] = "drawn"

    def roles(self, module_type="linear", name=""):
        rotation = jlp.Hadamard(self.size, self.signs)
        gradient = Role(NVFP4, self.rounding, rotation)
        return Roles(Role(NVFP4, hadamard=rotation), Role(jlp.NVFP4((16, 16))), gradient)


RECIPES = {"16": Drawn(), "128": Drawn(128), "128 stochastic": Drawn(128, "stochastic")}
over_recipes = pytest.mark.parametrize("recipe", often([RECIPES["128 stochastic"]], RECIPES.values()), ids=RECIPES)


def operands(shape=(136, 96, 40)):
    """X [..., T, K] bfloat16, kernel [K, N] float32, the gradient of the result [..., T, N]."""
    *t, k, n = shape
    return random_array((*t, k)), random_array((k, n), "float32", 1), random_array((*t, n), seed=2)


@functools.partial(jax.jit, static_argnames=("recipe", "function", "name"))
def step(x, w, dy, key=KEY, recipe=RECIPES["16"], function=jlp.linear, **options):
    """y, dx and dw."""
    y, pullback = jax.vjp(lambda x, w: function(x, w, recipe=recipe, key=key, **options), x, w)
    return y, *pullback(dy)


@functools.partial(jax.jit, static_argnames="recipe")
def wgrad(x, dy, recipe, sign_key, key=KEY):
    """dw in float32 from matrices x and dy, by the roles of its operands."""
    rotation = jlp.Hadamard(recipe.size, "drawn")
    rounds = {"rounding": "stochastic", "key": key} if recipe.rounding == "stochastic" else {}
    a = jlp.quantize(x, NVFP4, axis=-2, hadamard=rotation, sign_key=sign_key)
    b = jlp.quantize(dy, NVFP4, axis=-2, hadamard=rotation, sign_key=sign_key, **rounds)
    return jlp.scaled_matmul(a.mT, b.mT, preferred_element_type=jnp.float32)


class TestGemms:
    @over_recipes
    def test_wgrad_reads_operands_rotated_by_the_layers_key(self, recipe):
        """And the other GEMMs are those of the recipe without a rotation."""
        x, w, dy = operands()
        y, dx, dw = step(x, w, dy, recipe=recipe)
        assert_same_bytes(dw, wgrad(x, dy, recipe, KEY))
        plain = jlp.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=recipe.rounding == "nearest", disable_2d_quantization=False
        )
        assert_same_bytes((y, dx), step(x, w, dy, recipe=plain)[:2])

    @over_recipes
    def test_without_a_key_the_signs_come_from_the_input(self, recipe):
        x, w, dy = operands()
        found = step(x, w, dy, None, recipe, name="up")
        words = keyless_words(np.abs(np.float32(x)).max(), keyless_seed(136, 96, "up"))
        if recipe.rounding == "nearest":
            assert_same_bytes(found[2], wgrad(x, dy, recipe, words))
        twice = 2 * np.asarray(x)
        for changed in (step(x, w, dy, None, recipe, name="down"), step(twice, w, dy, None, recipe, name="up")):
            assert (np.asarray(changed[2]) != np.asarray(found[2])).any()

    @pytest.mark.slow
    def test_it_cancels(self):
        x, w, dy = operands((512, 96, 40))
        exact = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
        for recipe in RECIPES.values():
            for key in (KEY, None):
                dw = np.asarray(step(x, w, dy, key, recipe)[2], np.float64)
                assert np.linalg.norm(dw - exact) < 0.25 * np.linalg.norm(exact)

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [16, 128])
    def test_rows_in_parts_are_those_of_the_matrix(self, size):
        """Signs are those of the layer, not of a part."""
        x, w, dy = operands((2, 3, 128, 96, 40))
        for key in (KEY, None):
            merged = step(x.reshape(768, 96), w, dy.reshape(768, 40), key, Drawn(size), name="up")
            parts = step(x, w, dy, key, Drawn(size), name="up")
            assert_same_bytes(parts[2], merged[2])
            assert_same_bytes(parts[0].reshape(merged[0].shape), merged[0])

    def test_products_with_batch_axes(self):
        """One vector of a key for all matrices; without a key one for each."""
        x, w, dy = random_array((2, 64, 32)), random_array((2, 32, 48), seed=1), random_array((2, 64, 48), seed=2)
        product = functools.partial(jlp.einsum, "btk,bkn->btn")
        dw = np.asarray(step(x, w, dy, function=product)[2])
        for i in range(2):
            assert_same_bytes(dw[i], np.asarray(wgrad(x[i], dy[i], Drawn(), KEY)).astype(w.dtype))
        assert np.isfinite(np.float32(step(x, w, dy, None, function=product)[2])).all()

    def test_gemms_in_high_precision_need_no_signs(self):
        x, w, dy = operands()
        found = step(x, w, dy, recipe=Drawn(backward_override="high_precision"))
        assert_same_bytes(found, step(x, w, dy, recipe=jlp.NVFP4BlockScaling(backward_override="high_precision")))


class TestTransformations:
    def test_steps_have_their_own_signs_and_one_trace(self):
        x, w, dy = operands()
        traced = []

        @jax.jit
        def train(x, w, dy, key):
            traced.append(key)
            return step(x, w, dy, key)

        found = [np.asarray(train(x, w, dy, key)[2]) for key in jax.random.split(KEY, 3)]
        assert len(traced) == 1
        assert (found[0] != found[1]).any() and (found[1] != found[2]).any()
        for dw, key in zip(found, jax.random.split(KEY, 3), strict=True):
            assert_same_bytes(dw, wgrad(x, dy, Drawn(), key))

    @pytest.mark.parametrize(
        ("key", "remat"),
        often([(None, True)], [(None, True), (None, False), (KEY, True), (KEY, False)], 2),
        ids=["no key, remat", "no key", "key, remat", "key"],
    )
    def test_scan_over_layers(self, key, remat):
        """The signs are kept with the input, and recomputed alike."""
        x, ws = random_array((64, 32)), random_array((2, 32, 32), "float32", 1)

        def layer(x, w):
            return jlp.linear(x, w, recipe=Drawn(), key=key), None

        def loop(x, ws):
            for w in ws:
                x = layer(x, w)[0]
            return x

        def scan(x, ws):
            return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, ws)[0]

        dy = random_array((64, 32), seed=2)
        expected, found = (jax.jit(lambda x, ws, f=f: jax.vjp(f, x, ws)[1](dy))(x, ws) for f in (loop, scan))
        assert_same_bytes(found, expected)

    def test_vmap_over_layers_and_keys(self):
        x, w, dy = (np.stack([a, -np.asarray(a)]) for a in operands())
        keys = jax.random.split(KEY, 2)
        found = jax.device_get(jax.jit(jax.vmap(step))(x, w, dy, keys))
        for i in range(2):
            assert_same_bytes(jax.tree.map(lambda a, i=i: a[i], found), step(x[i], w[i], dy[i], keys[i]))

    @pytest.mark.slow
    @pytest.mark.parametrize(("spec", "size"), [(P("a", None), 16), (P(None, "a"), 16), (P("a", None), 128)])
    def test_meshes_have_the_signs_of_one_device(self, spec, size):
        x, w, dy = operands((512, 64, 64))
        for key in (KEY, None):
            run = jax.jit(functools.partial(step, key=key, recipe=Drawn(size)))
            mesh = mesh_of((4,))
            placed = (place(x, mesh, spec), place(w, mesh, P()), place(dy, mesh, P(spec[0], None)))
            y, dx, dw = run(*placed)
            alone = run(x, w, dy)
            if spec[0] is None:  # no contraction of dgrad or wgrad is split
                assert_same_bytes((dx, dw), alone[1:])
            np.testing.assert_allclose(dw, alone[2], atol=1e-4)  # sums over tokens are split

    @pytest.mark.parametrize("check_vma", often([True], [True, False]))
    def test_shards_of_shard_map_are_layers_of_their_own(self, check_vma):
        """A key gives all of them the same signs, an input each its own; either way each shard's cancel."""
        x, w, dy = operands((512, 64, 64))

        def local(x, w, dy, key):
            dw = step(x, w, dy, key, name="up")[2]
            return dw if check_vma else jax.lax.psum(dw, "a")  # with it JAX adds up the gradient of what all hold

        for key in (KEY, None):
            specs = {"in_specs": (P("a"), P(), P("a")), "out_specs": P(), "check_vma": check_vma}
            f = jax.jit(jax.shard_map(functools.partial(local, key=key), mesh=mesh_of((4,)), **specs))
            shards = zip(np.split(np.asarray(x), 4), np.split(np.asarray(dy), 4), strict=True)
            parts = [np.asarray(step(own, w, d, key, name="up")[2]) for own, d in shards]
            np.testing.assert_allclose(f(x, w, dy), sum(parts), atol=1e-3)

    @pytest.mark.slow
    def test_telemetry_measures_what_was_rotated(self):
        """As with the same fixed signs."""
        x, w, _ = operands((128, 64, 64))
        words = np.asarray(jlp.quantize(x, NVFP4, hadamard=jlp.Hadamard(128, "drawn"), sign_key=KEY).signs)
        signs = tuple(1 - 2 * (int(words[i // 32]) >> i % 32 & 1) for i in range(128))

        def measured(recipe):
            def loss(w, x):
                return jlp.linear(x, w, recipe=recipe, key=KEY, name="up").astype(jnp.float32).var()

            value, found = jlp.telemetry.value_and_grad(loss)(w, x)
            return value, {tensor: s.values for tensor, s in jlp.telemetry.read(found)["up"].items()}

        (value, found), (fixed_value, fixed) = (measured(Drawn(128, signs=s)) for s in ("drawn", signs))
        assert_same_bytes(value, fixed_value)
        assert found.keys() == fixed.keys()
        for tensor, values in found.items():
            np.testing.assert_array_equal(values, fixed[tensor], tensor)
        assert "gradient columnwise" in found

    def test_telemetry_asks_what_if_signs_were_drawn(self):
        x, w, _ = operands((128, 64, 64))

        def loss(w, x):
            return jlp.linear(x, w, recipe=jlp.NVFP4BlockScaling(), key=KEY, name="up").astype(jnp.float32).var()

        _, found = jax.jit(lambda w, x: jlp.telemetry.value_and_grad(loss, what_if={"drawn": Drawn(128)})(w, x))(w, x)
        values = jlp.telemetry.read(found)["up"]["gradient columnwise, drawn"].values
        assert np.isfinite(values[:2]).all()


class TestSharedInputs:
    def test_linears_have_the_first_layers_signs(self):
        x, w, dy = operands((128, 64, 48))

        def both(x, ws):
            return jlp.linears(x, ws, recipe=Drawn(128), key=KEY)

        dy = np.asarray(dy)
        dws = jax.jit(lambda x, w, dy: jax.vjp(both, x, [w, -w])[1]((dy, 2 * dy))[1])(x, w, dy)
        first = jax.random.fold_in(KEY, 0)
        assert_same_bytes(dws, [wgrad(x, dy, Drawn(128), first), wgrad(x, 2 * dy, Drawn(128), first)])

    @pytest.mark.parametrize("saved", often(["8bit", "recompute"], ["quantized", "8bit", "recompute"]))
    @pytest.mark.parametrize("key", often([KEY], [KEY, None]), ids=lambda key: "key" if key is not None else "no key")
    def test_an_mlp_is_linears_and_its_activation(self, saved, key):
        """Its backward pass quantises the activation again, with the same signs."""
        x, dy, recipe = random_array((256, 64)), random_array((256, 64), seed=1), Drawn(128)
        ws = [weights(s, i) for i, s in enumerate([(64, 128), (64, 128), (128, 64)])]

        def separate(x, ws):
            hidden = jlp.linears(x, ws[:2], recipe=recipe, key=key)
            own = None if key is None else jax.random.fold_in(key, 2)
            return jlp.linear(jlp.swiglu(*hidden), ws[2], recipe=recipe, key=own)

        def mlp(x, ws):
            return jlp.mlp(x, ws, recipe=recipe, key=key, saved=saved)

        expected, found = (jax.jit(lambda x, ws, dy, f=f: jax.vjp(f, x, ws)[1](dy))(x, ws, dy) for f in (separate, mlp))
        if saved == "8bit":
            for dw, like in zip(found[1], expected[1], strict=True):
                assert relative_error(dw, like) < 0.3
        else:
            assert_same_bytes(found[1], expected[1])


class TestModules:
    def test_linen_draws_a_key(self):
        x = random_array((64, 32))
        layer = jlp.linen.Dense(48)
        params = layer.init(jax.random.key(0), x)

        def dw(seed):
            def loss(params):
                with jlp.autocast(Drawn()):
                    return layer.apply(params, x, rngs={"sr": jax.random.key(seed)}).astype(jnp.float32).var()

            return jax.grad(loss)(params)["params"]["kernel"]

        assert_same_bytes(dw(1), dw(1))
        assert (dw(1) != dw(2)).any()

    def test_nnx_draws_a_key(self):
        x = random_array((64, 32))
        layer = jlp.nnx.Linear(32, 48, rngs=nnx.Rngs(0, sr=1))

        def loss(layer):
            with jlp.autocast(Drawn()):
                return layer(x).astype(jnp.float32).var()

        first, second = (nnx.grad(loss)(layer)["kernel"][...] for _ in range(2))
        assert (first != second).any()


class TestRefused:
    ROTATED, FIXED = Role(NVFP4, hadamard=jlp.Hadamard(16, "drawn")), Role(NVFP4, hadamard=jlp.Hadamard())
    PLAIN = Role(NVFP4)

    @pytest.mark.parametrize(
        ("roles", "message"),
        [
            (
                (ROTATED, PLAIN, FIXED),
                r"input has hadamard=Hadamard\(16, drawn\) in wgrad and gradient has Hadamard\(16\)",
            ),
            ((ROTATED, PLAIN, PLAIN), r"gradient has None; a rotation cancels only if both operands have it"),
            ((PLAIN, PLAIN, ROTATED), r"input has hadamard=None in wgrad and gradient has Hadamard\(16, drawn\)"),
            (
                (ROTATED, ROTATED, ROTATED),
                r"weight has hadamard=Hadamard\(16, drawn\); the rotation of a weight belongs",
            ),
            ((FIXED, PLAIN, PLAIN), r"input has hadamard=Hadamard\(16\) in wgrad and gradient has None"),
        ],
    )
    def test_rotations_that_do_not_cancel(self, roles, message):
        with pytest.raises(ValueError, match=message):
            Roles(*roles)

    @pytest.mark.parametrize(
        ("gemms", "message"),
        [
            ({"dgrad": (ROTATED, PLAIN)}, r"gradient has hadamard=Hadamard\(16, drawn\) in dgrad and weight has None"),
            ({"dgrad": (FIXED, ROTATED)}, r"in dgrad and weight has Hadamard\(16, drawn\); a rotation cancels only"),
            ({"wgrad": (FIXED, PLAIN)}, r"input has hadamard=Hadamard\(16\) in wgrad and gradient has None"),
            (
                {"fprop": (FIXED, FIXED)},
                r"fprop has an operand with hadamard=Hadamard\(16\); only operands of dgrad and",
            ),
            (
                {"requantized": ("gradient",)},
                r'requantized=\(.gradient.,\); needs a tuple of "input", "weight" or both',
            ),
            ({"requantized": "weight"}, r"requantized='weight'; needs a tuple"),
        ],
    )
    def test_gemms_of_their_own_whose_rotations_do_not_cancel(self, gemms, message):
        with pytest.raises(ValueError, match=f"Roles: .*{message}"):
            Roles(self.PLAIN, self.PLAIN, self.PLAIN, **gemms)

    def test_rows_in_groups(self):
        x, w = random_array((32, 32)), random_array((2, 32, 48))
        message = "rotates the input .* by Hadamard.16, drawn.; rows in groups take only NVFP4's .* with fixed signs"
        with pytest.raises(ValueError, match=message):
            jlp.grouped_matmul(x, w, jnp.array([12, 20]), recipe=Drawn())
