"""`NVFP4Eden`: the roles of its table, the products that it makes, and how much less noise wgrad has."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.ops.hadamard import STREAM_OF_DGRAD, drawn_signs
from jaxlowprec.ops.quantize.random_bits import further_words
from tests.helpers import assert_same_bytes, often, random_array
from tests.products import kept
from tests.sharding.meshes import mesh_of, place

DEFAULT, RECIPE, SQUARE = jlp.NVFP4BlockScaling(), jlp.NVFP4Eden(), jlp.NVFP4Eden("16x16")
SEARCH, AGAIN = jlp.NVFP4Eden(scale_rule="search"), jlp.NVFP4Eden(requantize_input=True)
CHOSEN = jlp.NVFP4(scale_rule="four_over_six_mse")
KEY = jax.random.key(3)
X, W, DY = random_array((256, 128)), random_array((128, 96), "float32", 1), random_array((256, 96), seed=2)


@functools.partial(jax.jit, static_argnames="recipe")
def step(recipe, key=KEY, x=X, w=W, dy=DY):
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=key), x, w)
    return (y, *pullback(dy))


def relative_square(found, exact):
    found, exact = np.float32(found), np.float32(exact)
    return np.sum(np.square(found - exact), dtype=np.float64) / np.sum(np.square(exact), dtype=np.float64)


class TestRoles:
    def test_are_those_of_the_table(self):
        roles = RECIPE.roles()
        operand = jlp.Role(CHOSEN, "eden", jlp.Hadamard(128, "drawn"))
        assert roles.operands("fprop") == (jlp.Role(CHOSEN), jlp.Role(CHOSEN))
        assert roles.operands("dgrad") == roles.operands("wgrad") == (operand, operand)
        assert roles.requantized == ("weight",)

    def test_of_square_weights(self):
        roles = SQUARE.roles()
        weight = jlp.Role(jlp.NVFP4((16, 16), "four_over_six_mse"))
        operand = jlp.Role(CHOSEN, "eden", jlp.Hadamard(128, "drawn"))
        assert roles.operands("fprop") == (jlp.Role(CHOSEN), weight)
        assert roles.operands("dgrad") == (jlp.Role(jlp.NVFP4(), "stochastic"), weight)
        assert roles.operands("wgrad") == (operand, operand)
        assert roles.requantized == ()

    def test_of_the_gradient_alone(self):
        """torchao's V2: what is not rounded by eden has no scales that would shorten it."""
        roles = jlp.NVFP4Eden(scale_rule="search", eden="gradient").roles()
        rotation = jlp.Hadamard(128, "drawn")
        gradient, other = (
            jlp.Role(jlp.NVFP4(scale_rule="search"), "eden", rotation),
            jlp.Role(jlp.NVFP4(), "nearest", rotation),
        )
        assert roles.operands("dgrad") == (gradient, other)
        assert roles.operands("wgrad") == (other, gradient)

    @pytest.mark.parametrize("rule", ["six", "four_over_six", "four_over_six_mse", "search"])
    @pytest.mark.parametrize("size", [16, 32, 64, 128])
    def test_fields_are_followed(self, rule, size):
        recipe = jlp.NVFP4Eden("1x16", rule, "both", size, "fixed", True, "dequantized")
        operand = jlp.Role(jlp.NVFP4(scale_rule=rule), "eden", jlp.Hadamard(size))
        assert recipe.roles().operands("dgrad") == recipe.roles().operands("wgrad") == (operand, operand)
        assert recipe.roles().weight.format == recipe.roles().input.format == jlp.NVFP4(scale_rule=rule)
        assert recipe.roles().requantized == ("input", "weight")
        assert recipe.roles().operands("dgrad", recipe.backward_override) == "dequantized"

    @pytest.mark.parametrize(
        ("field", "value", "error", "needs"),
        [
            ("weight_block", "32x32", ValueError, 'needs "1x16" or "16x16"'),
            ("eden", "input", ValueError, 'needs "both" or "gradient"'),
            ("requantize_input", 1, TypeError, "needs True or False"),
            ("scale_rule", "best", ValueError, 'needs "six" or "four_over_six" or'),
            ("rotation", 256, ValueError, "needs 16 or 32 or 64 or 128"),
            ("rotation", True, ValueError, "needs 16"),
            ("signs", None, ValueError, 'needs "drawn" or "fixed"'),
            ("backward_override", "bf16", ValueError, 'needs None or "high_precision" or "dequantized"'),
            ("forward_override", "dequantized", ValueError, 'needs None or "high_precision"'),
        ],
    )
    def test_bad_fields(self, field, value, error, needs):
        with pytest.raises(error, match=f"NVFP4Eden: {field}=.*; {needs}"):
            jlp.NVFP4Eden(**{field: value})

    def test_both_overrides_would_quantise_nothing(self):
        with pytest.raises(ValueError, match="NVFP4Eden: forward_override='high_precision' and backward_override="):
            jlp.NVFP4Eden(forward_override="high_precision", backward_override="dequantized")


def words_of(stream):
    """Bits that an operand takes with KEY: the gradient's are the key's own."""
    words = jax.random.key_data(KEY)
    return further_words(words, stream) if stream else words


@functools.partial(jax.jit, static_argnames="recipe")
def dgrads_operands(recipe, w=W, dy=DY):
    """The gradient and the weight [K, N], quantised along N as dgrad reads them, by `quantize` alone."""
    fmt, signs = recipe.roles().input.format, drawn_signs(jax.random.key_data(KEY), STREAM_OF_DGRAD)
    rotation = jlp.Hadamard(recipe.rotation, "drawn")
    forward = jlp.quantize(w, fmt, axis=-2)
    eden = {"rounding": "eden", "key": words_of(4)} if recipe.eden == "both" else {}
    decoded = forward.dequantize(jnp.bfloat16)
    again = jlp.quantize(decoded, fmt if eden else jlp.NVFP4(), axis=-1, hadamard=rotation, sign_key=signs, **eden)
    return jlp.quantize(dy, fmt, axis=-1, hadamard=rotation, rounding="eden", key=words_of(0), sign_key=signs), again


class TestProducts:
    @pytest.mark.parametrize("recipe", [RECIPE, SQUARE], ids=["1x16", "16x16"])
    def test_forward_reads_operands_of_chosen_scales(self, recipe):
        x, w = jlp.quantize(X, CHOSEN), jlp.quantize(W, recipe.roles().weight.format, axis=-2)
        assert_same_bytes(step(recipe)[0], jlp.scaled_matmul(x, w.mT, preferred_element_type=X.dtype))

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"eden": "gradient", "scale_rule": "six"},
            {"rotation": 16, "scale_rule": "search"},
            {"rotation": 32, "scale_rule": "four_over_six"},
        ],
        ids=str,
    )
    def test_dgrad_reads_the_forward_passs_weight_rotated(self, changes):
        """N is 96: the last transform of 128 is padded in both operands."""
        recipe = jlp.NVFP4Eden(**changes)
        dy, w = dgrads_operands(recipe)
        assert_same_bytes(step(recipe)[1], jlp.scaled_matmul(dy, w, preferred_element_type=X.dtype))

    def test_wgrads_input_is_that_of_the_forward_pass_if_asked(self):
        recipe = jlp.NVFP4Eden(requantize_input=True)
        rotation = jlp.Hadamard(128, "drawn")
        decoded = jlp.quantize(X, CHOSEN).dequantize(jnp.bfloat16)
        x, dy = (
            jlp.quantize(a, CHOSEN, axis=-2, hadamard=rotation, rounding="eden", key=words_of(stream), sign_key=KEY)
            for a, stream in ((decoded, 3), (DY, 0))
        )
        assert_same_bytes(step(recipe)[2], jlp.scaled_matmul(x.mT, dy.mT, preferred_element_type=jnp.float32))
        assert_same_bytes(step(recipe)[:2], step(RECIPE)[:2])

    def test_dgrad_of_square_weights_is_the_default_recipes(self):
        plain = dataclasses.replace(SQUARE, scale_rule="six")
        assert_same_bytes(step(plain)[:2], step(DEFAULT)[:2])
        assert (np.asarray(step(SQUARE)[1]) != np.asarray(step(DEFAULT)[1])).any()

    @pytest.mark.parametrize("recipe", often([SQUARE], [RECIPE, SQUARE]), ids=["1x16", "16x16"])
    def test_custom_roles_give_the_same(self, recipe):
        roles = recipe.roles()
        operands = {"input": {"fprop": CHOSEN, "wgrad": roles.wgrad[0]}, "weight": roles.weight}
        operands["grad_output"] = {"dgrad": roles.gradient, "wgrad": roles.wgrad[1]}
        if recipe is SQUARE:
            assert_same_bytes(step(recipe), step(jlp.Custom(lambda role: operands[role.tensor_type])))
        assert_same_bytes(step(recipe), step(jlp.PerGemm(recipe, recipe, recipe)))

    def test_another_key_and_fixed_signs_give_other_gradients(self):
        given = (RECIPE,), (RECIPE, jax.random.key(4)), (jlp.NVFP4Eden(signs="fixed"),)
        all_of_them = [jax.device_get(step(*one)) for one in given]
        for i in (1, 2):
            pairs = itertools.combinations(all_of_them, 2)
            assert all((a[i] != b[i]).any() for a, b in pairs)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("recipe", "errors"),
        often(
            [(DEFAULT, (21.2, 18.8, 27.5)), (RECIPE, (15.0, 16.1, 16.1))],
            [
                (DEFAULT, (21.2, 18.8, 27.5)),
                (SQUARE, (20.1, 18.8, 16.1)),
                (jlp.NVFP4Eden(scale_rule="six"), (18.0, 18.8, 18.8)),
                (jlp.NVFP4Eden(scale_rule="six", eden="gradient"), (18.0, 18.5, 18.5)),
                (RECIPE, (15.0, 16.1, 16.1)),
                (SEARCH, (13.8, 15.5, 15.5)),
            ],
            2,
        ),
        ids=["default", "16x16", "six", "V2", "four_over_six_mse", "search"],
    )
    def test_errors_of_the_products(self, recipe, errors):
        """Squared, over that of the exact product, by 1000 (frontier of NVFP4 training). The gradient of the input is
        that of the weight that fprop reads."""
        shapes = (2048, 128), (128, 2048), (2048, 2048)
        x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
        read = jlp.quantize(w, recipe.roles().weight.format, axis=-2).dequantize()
        exact = [jnp.matmul(a, b, precision="highest") for a, b in ((x, w), (dy, read.T), (x.T, dy))]
        found = [1000 * relative_square(*pair) for pair in zip(step(recipe, KEY, x, w, dy), exact, strict=True)]
        assert found == pytest.approx(errors, abs=0.5)

    def test_error_of_a_weight_that_is_quantised_again(self):
        """Of V2's second operand, against the weight that fprop reads: as large as that of a first quantisation."""
        w = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
        read = jlp.quantize(w, jlp.NVFP4(), axis=-2).dequantize(jnp.bfloat16)
        again = jlp.quantize(read, jlp.NVFP4(), axis=-1, hadamard=jlp.Hadamard(128, "drawn"), sign_key=KEY)
        assert 1000 * relative_square(again.dequantize(), read) == pytest.approx(9.03, abs=0.1)

    def test_wgrad_has_six_tenths_of_the_noise(self):
        numbers = np.random.default_rng(0)
        x, dy = (numbers.standard_normal((4096, 64), np.float32) for _ in range(2))
        w = np.zeros((64, 64), np.float32)
        exact = x.T @ dy
        errors = {recipe: relative_square(step(recipe, KEY, x, w, dy)[2], exact) for recipe in (DEFAULT, RECIPE)}
        assert 0.55 < errors[RECIPE] / errors[DEFAULT] < 0.65

    @pytest.mark.parametrize("recipe", often([RECIPE], [RECIPE, SEARCH]), ids=["default", "search"])
    def test_their_mean_is_the_gradient(self, recipe):
        """That of the weight that the forward pass reads."""
        read = jlp.quantize(W, recipe.roles().weight.format, axis=-2).dequantize(jnp.bfloat16)
        x, dy = np.float32(X), np.float32(DY)
        exact = dy @ np.float32(read).T, x.T @ dy
        keys = jax.random.split(jax.random.key(0), 64)
        draws = jax.jit(jax.vmap(lambda key: step(recipe, key, x, W, dy)[1:], axis_size=64))(keys)
        for drawn, whole in zip(jax.device_get(draws), exact, strict=True):
            one, mean = relative_square(drawn[0], whole), relative_square(drawn.mean(0), whole)
            assert 0.7 < 64 * mean / one < 1.5

    def test_a_new_key_compiles_nothing(self):
        before = step._cache_size()
        results = [np.asarray(step(RECIPE, jax.random.key(seed))[2]) for seed in range(3)]
        assert step._cache_size() <= before + 1 and (results[0] != results[1]).any()

    def test_the_forward_pass_in_high_precision(self):
        """Then there are no codes of it: dgrad's weight is quantised from the master weight."""
        found = step(jlp.NVFP4Eden(forward_override="high_precision"))
        assert_same_bytes(found[0], step(jlp.NVFP4BlockScaling(forward_override="high_precision"))[0])
        assert_same_bytes(found[2], step(RECIPE)[2])
        dy, _ = dgrads_operands(RECIPE)
        rotation = jlp.Hadamard(128, "drawn")
        w = jlp.quantize(W, CHOSEN, axis=-1, hadamard=rotation, rounding="eden", key=words_of(4), sign_key=dy.signs)
        assert_same_bytes(found[1], jlp.scaled_matmul(dy, w, preferred_element_type=X.dtype))

    @pytest.mark.slow
    def test_a_kernel_that_is_quantised_once(self):
        """With the layer's key it is what the layer would make; without one its signs and bits are its own."""
        for key in (KEY, None):
            once = jlp.quantize_kernel(W, RECIPE, key=key, name="up")

            def reused(x, w, once=once, key=key):
                return jlp.linear(x, w, recipe=RECIPE, key=key, quantized_kernel=once, name="up")

            def anew(x, w, key=key):
                return jlp.linear(x, w, recipe=RECIPE, key=key, name="up")

            assert_same_bytes(*jax.jit(lambda r=reused, a=anew: [jax.vjp(f, X, W)[1](DY) for f in (r, a)])())
        assert (jlp.quantize_kernel(W, RECIPE, name="a").rowwise.signs != once.rowwise.signs).any()

    def test_backward_pass_keeps_four_bits_of_both_operands(self):
        found = kept(lambda x, w: jlp.linear(x, w, recipe=RECIPE, key=KEY), X, W)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in found if leaf.dtype != KEY.dtype)
        assert size < 0.7 * (X.size + 128 * 128)  # w is padded from 96 columns to a whole transform

    @pytest.mark.slow
    @pytest.mark.parametrize("saved", often(["recompute"], ["quantized", "8bit", "recompute"]))
    @pytest.mark.parametrize("recipe", often([AGAIN], [RECIPE, AGAIN]), ids=["default", "requantize_input"])
    def test_an_mlp_is_linears_and_its_activation(self, saved, recipe):
        x, dy = random_array((256, 64)), random_array((256, 64), seed=1)
        ws = [random_array(s, "float32", i) / 8 for i, s in enumerate([(64, 128), (64, 128), (128, 64)])]

        def separate(x, ws):
            hidden = jlp.linears(x, ws[:2], recipe=recipe, key=KEY)
            return jlp.linear(jlp.swiglu(*hidden), ws[2], recipe=recipe, key=jax.random.fold_in(KEY, 2))

        def mlp(x, ws):
            return jlp.mlp(x, ws, recipe=recipe, key=KEY, saved=saved)

        found, expected = (jax.jit(lambda x, ws, dy, f=f: jax.vjp(f, x, ws)[1](dy))(x, ws, dy) for f in (mlp, separate))
        if saved == "8bit":
            for dw, like in zip(found[1], expected[1], strict=True):
                assert jnp.linalg.norm(dw - like) < 0.3 * jnp.linalg.norm(like)
        else:
            assert_same_bytes(found, expected)

    def test_accumulation_quantises_its_kernel_once(self):
        """With signs and bits of the kernel, as without a key."""
        params, batch = {"w": W}, (X, DY)

        def loss(params, part):
            y = jlp.linear(part[0], params["w"], recipe=RECIPE, name="up")
            return jnp.sum(y.astype(jnp.float32) * part[1].astype(jnp.float32))

        _, found = jax.jit(jlp.accumulate_gradients(loss, microbatches=2))(params, batch)
        one, batch = jax.jit(jax.grad(loss)), jax.device_get(batch)
        each = [np.asarray(one(params, jax.tree.map(lambda a, i=i: a[i::2], batch))["w"]) for i in range(2)]
        np.testing.assert_allclose(found["w"], sum(each) / 2, rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("spec", often([P(None, "a")], [P("a", None), P(None, "a")]), ids=["rows", "features"])
    def test_meshes_have_the_bits_of_one_device(self, spec):
        """Of eight devices; features in shards of whole transforms."""
        x, w, dy = random_array((512, 128)), random_array((128, 1024), "float32", 1), random_array((512, 1024), seed=2)
        for key in (KEY, None):
            run = jax.jit(lambda x, w, dy, key=key: step(RECIPE, key, x, w, dy))
            mesh = mesh_of((8,))
            kernel = P(None, spec[1])
            y, dx, dw = run(place(x, mesh, P(spec[0])), place(w, mesh, kernel), place(dy, mesh, spec))
            alone = run(x, w, dy)
            assert_same_bytes(y, alone[0])
            for found, expected in ((dx, alone[1]), (dw, alone[2])):  # the sums of one of them are split
                np.testing.assert_allclose(np.float32(found), np.float32(expected), atol=0.02 * np.abs(expected).max())
            assert_same_bytes(dx if spec[1] is None else dw, alone[1] if spec[1] is None else alone[2])

    @pytest.mark.slow
    def test_telemetry_measures_what_dgrad_reads(self):
        def loss(w):
            return jnp.mean(jlp.linear(X, w, name="layer").astype(jnp.float32) ** 2)

        with jlp.autocast(DEFAULT):
            _, seen = jlp.telemetry.value_and_grad(loss, what_if={"eden": RECIPE})(W)
        what_if = jlp.telemetry.read(seen)["layer"]
        with jlp.autocast(RECIPE):
            _, seen = jlp.telemetry.value_and_grad(loss)(W)
        found = jlp.telemetry.read(seen)["layer"]
        assert 18 < float(found["gradient rowwise"].sqnr) < 25
        assert 15 < float(what_if["weight rowwise, eden"].sqnr) < 22  # quantised twice
        assert 15 < float(found["dgrad"].sqnr) < 20


class TestLayers:
    @pytest.mark.parametrize("signs", often(["drawn"], ["drawn", "fixed"]))
    def test_of_linen_and_nnx(self, signs):
        recipe, options = jlp.NVFP4Eden(signs=signs), {"use_bias": False, "dtype": jnp.bfloat16}
        dense = jlp.linen.Dense(96, recipe=recipe, **options)
        linear = jlp.nnx.Linear(128, 96, recipe=recipe, rngs=nnx.Rngs(0), **options)
        linear.kernel[...] = W

        @jax.jit
        def all_of_them():
            return jlp.linear(X, W, recipe=recipe), dense.apply({"params": {"kernel": W}}, X), linear(X)

        expected, *found = all_of_them()
        assert_same_bytes(found, [expected, expected])

    @pytest.mark.slow
    def test_of_experts_have_fixed_signs(self):
        w, sizes = jnp.stack([W, -W]), jnp.array([100, 156], jnp.int32)

        def gradient(recipe):
            loss = lambda w: jlp.grouped_matmul(X, w, sizes, None, recipe, key=KEY).astype(jnp.float32).var()  # noqa: E731
            return jax.grad(loss)(w)

        with pytest.raises(ValueError, match="rows in groups take only NVFP4's rotation of size 16 with fixed signs"):
            gradient(RECIPE)
        with pytest.raises(
            ValueError, match="rotates the weight by .* in dgrad; layers of experts rotate only wgrad's"
        ):
            gradient(jlp.NVFP4Eden(rotation=16, signs="fixed"))
        experts = jlp.NVFP4Eden("16x16", rotation=16, signs="fixed")
        assert 0 < relative_square(gradient(experts), gradient(None)) < 0.1
