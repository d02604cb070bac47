"""Mixed precision inside a linear: each GEMM has the operands that its own recipe quantises, byte for byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, often, random_array
from tests.layers.fused.layers import traced_calls
from tests.layers.grouped.test_grouped import loop_of_linear
from tests.layers.grouped.test_grouped import results as grouped_results
from tests.products import assert_is_product, kept, native_calls, quantizations_and_gradients
from tests.sharding.meshes import mesh_of, place

KEY = jax.random.key(5)
NVFP4, MXFP8, BLOCK = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling(), jlp.Float8BlockScaling()
UNROTATED = jlp.NVFP4BlockScaling(disable_rht=True)
ROTATED = jlp.QParams(random_hadamard_transform=True)
ROTATED_AND_STOCHASTIC = jlp.QParams(random_hadamard_transform=True, stochastic_rounding=True)
CURRENT = jlp.Float8CurrentScaling(fp8_quant_fwd_inp=ROTATED, fp8_quant_bwd_grad=ROTATED_AND_STOCHASTIC)
MIXTURES = {
    "nvfp4 forward, mxfp8 backward": (NVFP4, MXFP8, MXFP8),
    "nvfp4 forward, fp8 blocks backward": (NVFP4, BLOCK, BLOCK),
    "one each": (MXFP8, BLOCK, NVFP4),
    "rotated stochastic tensors in wgrad": (MXFP8, NVFP4, CURRENT),
    "rotated tensors in fprop": (CURRENT, CURRENT, MXFP8),
    "only fprop": (NVFP4, None, None),
    "only dgrad": (None, NVFP4, None),
    "only wgrad": (None, None, NVFP4),
    "dgrad in high precision": (NVFP4, None, NVFP4),
    "wgrad in high precision": (NVFP4, MXFP8, None),
    "fprop in high precision": (None, MXFP8, NVFP4),
    "dgrad of the decoded weight": (NVFP4, "dequantized", MXFP8),
    "wgrad of the decoded input": (MXFP8, NVFP4, "dequantized"),
    "both of what fprop has read": (NVFP4, "dequantized", "dequantized"),
}
ALWAYS = ("one each", "only wgrad", "dgrad of the decoded weight")


def operands(shape=(136, 200, 40)):
    """X [T, K] bfloat16, kernel [K, N] float32, the gradient of the result [T, N]."""
    t, k, n = shape
    return random_array((t, k)), random_array((k, n), "float32", 1), random_array((t, n), seed=2)


@functools.partial(jax.jit, static_argnames=("recipe", "name"))
def run(recipe, x, w, dy, key=KEY, **options):
    """y, dx and dw."""
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, recipe=recipe, key=key, **options), x, w)
    return y, *pullback(dy)


@functools.partial(jax.jit, static_argnames=("recipe", "gemm"))
def quantised(recipe, gemm, x, w, dy):
    """Both operands of a GEMM under a recipe, contraction-last."""
    roles = recipe.roles()
    rounds = {"rounding": roles.gradient.rounding, "key": KEY if roles.gradient.rounding == "stochastic" else None}
    if gemm == 0:
        return jlp.quantize(x, roles.input.format), jlp.quantize(w, roles.weight.format, axis=-2).mT
    if gemm == 1:
        return jlp.quantize(dy, roles.gradient.format, **rounds), jlp.quantize(w, roles.weight.format)
    column = jlp.quantize(x, roles.input.format, axis=-2, hadamard=roles.input.hadamard or False)
    return column.mT, jlp.quantize(
        dy, roles.gradient.format, axis=-2, hadamard=roles.gradient.hadamard or False, **rounds
    ).mT


def check(results, mixture, x, w, dy):
    """y, dx and dw are the products of the operands that each GEMM's own recipe quantises."""
    original = {"x": np.asarray(x, np.float64), "w": np.asarray(w).astype(x.dtype).astype(np.float64)}
    if isinstance(mixture[0], jlp.Recipe):
        a, b = quantised(mixture[0], 0, x, w, dy)
        a, b = (np.asarray(q.dequantize(x.dtype), np.float64) for q in (a, b))
        read = {"x": a, "w": b.T}
    for gemm, (result, recipe, like) in enumerate(zip(results, mixture, (x, x, w), strict=True)):
        assert result.dtype == like.dtype
        if isinstance(recipe, jlp.Recipe):
            a, b = quantised(recipe, gemm, x, w, dy)
            assert_same_bytes(result, jlp.scaled_matmul(a, b, preferred_element_type=like.dtype))
        else:
            seen, g = original if recipe is None else read, np.asarray(dy, np.float64)
            assert_is_product(result, *[(seen["x"], seen["w"]), (g, seen["w"].T), (seen["x"].T, g)][gemm])


class TestGemms:
    @pytest.mark.parametrize("name", often(ALWAYS, MIXTURES))
    def test_have_the_operands_of_their_own_recipes(self, name):
        x, w, dy = operands()
        check(run(jlp.PerGemm(*MIXTURES[name]), x, w, dy), MIXTURES[name], x, w, dy)

    def test_roles_of_your_own_say_the_same(self):
        """`Roles` are what any recipe may return; a field of a GEMM comes before the three operands."""
        x, w, dy = operands((32, 64, 48))
        mxfp8 = MXFP8.roles()

        class Own(jlp.Recipe):
            backward_override = None

            def roles(self, module_type="linear", name=""):
                plain = BLOCK.roles()
                dgrad = mxfp8.gradient, mxfp8.weight
                return jlp.Roles(plain.input, plain.weight, plain.gradient, dgrad=dgrad, wgrad="high_precision")

        check(run(Own(), x, w, dy), (BLOCK, MXFP8, None), x, w, dy)

    @pytest.mark.parametrize("recipe", often([NVFP4], [NVFP4, MXFP8, BLOCK, CURRENT]))
    def test_of_one_recipe_are_the_program_of_that_recipe(self, recipe):
        x, w, dy = operands((32, 64, 48))

        def program(recipe):
            return str(jax.make_jaxpr(functools.partial(run, recipe))(x, w, dy))

        assert program(jlp.PerGemm(recipe, recipe, recipe)) == program(recipe)

    def test_of_nvfp4_call_each_kernel_once_per_operand_and_gemm(self):
        calls = native_calls(functools.partial(run, NVFP4), *operands((32, 64, 48)))
        assert calls == {"jaxlowprec_amax": 3, "jaxlowprec_quantize": 3, "jaxlowprec_scaled_matmul": 3}

    def test_keyless_bits_are_those_of_the_recipe_that_rounds(self):
        x, w, dy = operands((32, 64, 48))
        _, dx, dw = run(jlp.PerGemm(MXFP8, NVFP4, NVFP4), x, w, dy, key=None, name="up")
        assert_same_bytes((dx, dw), run(NVFP4, x, w, dy, key=None, name="up")[1:])

    @pytest.mark.parametrize(
        ("mixture", "quantizes"),
        [
            ((NVFP4, NVFP4, UNROTATED), 3),  # x, w and dy in one pass each
            ((NVFP4, MXFP8, MXFP8), 5),  # dy in one pass, x and w in two
            ((NVFP4, None, None), 2),
            ((None, None, NVFP4), 2),
        ],
    )
    def test_a_tensor_is_passed_over_once_for_each_format(self, mixture, quantizes):
        x, w, dy = operands((32, 64, 48))
        calls = traced_calls(functools.partial(run, jlp.PerGemm(*mixture)), x, w, dy)
        assert calls["jaxlowprec_quantize"] == quantizes
        assert calls["jaxlowprec_scaled_matmul"] == sum(recipe is not None for recipe in mixture)


class TestBackwardOverride:
    x, w, dy = operands((32, 64, 48))

    def test_of_a_custom_recipe_comes_before_its_answers(self):
        recipe = jlp.Custom(nvfp4_and_mxfp8, backward_override="dequantized")
        check(run(recipe, self.x, self.w, self.dy), (NEAREST, "dequantized", "dequantized"), self.x, self.w, self.dy)


def nvfp4_and_mxfp8(role):
    gemms = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
    return {gemm: jlp.NVFP4() if gemm == "fprop" else jlp.MXFP8() for gemm in gemms[role.tensor_type]}


NEAREST = jlp.Custom(lambda role: jlp.NVFP4())


class TestCustom:
    x, w, dy = operands((32, 64, 48))

    def test_a_dict_answers_for_each_gemm(self):
        results = run(jlp.Custom(nvfp4_and_mxfp8), self.x, self.w, self.dy)
        check(results, (NEAREST, MXFP8, MXFP8), self.x, self.w, self.dy)


class TestResiduals:
    x, w, _ = operands((512, 256, 384))
    original, codes8, codes4 = ("bfloat16", 1), ("uint8", 1), ("uint8", 2)

    @pytest.mark.parametrize(
        ("mixture", "of_x", "of_w"),
        [
            ((NVFP4, MXFP8, MXFP8), codes8, codes8),
            ((MXFP8, NVFP4, BLOCK), codes8, codes4),
            ((NVFP4, None, None), original, ("float32", 1)),
            ((NVFP4, None, MXFP8), codes8, ("float32", 1)),
            ((NVFP4, MXFP8, None), original, codes8),
            ((NVFP4, "dequantized", MXFP8), codes8, codes4),
            ((NVFP4, MXFP8, "dequantized"), codes4, codes8),
        ],
    )
    def test_are_only_what_dgrad_and_wgrad_read(self, mixture, of_x, of_w):
        big = kept(functools.partial(jlp.linear, recipe=jlp.PerGemm(*mixture)), self.x, self.w)
        actual = sorted((leaf.size, leaf.dtype.name) for leaf in big if leaf.size > 1 << 14)
        expected = [(a.size // per_byte, name) for a, (name, per_byte) in ((self.x, of_x), (self.w, of_w))]
        assert actual == sorted(expected)

    def test_checkpoint_names_save_quantising_again(self):
        recipe = jlp.PerGemm(MXFP8, BLOCK, CURRENT)
        x, weights = random_array((32, 64)), np.asarray(random_array((2, 64, 64), "float32", 1)) / 8
        layer = functools.partial(jlp.linear, recipe=recipe)
        run = functools.partial(quantizations_and_gradients, layer, x, weights)
        policies = jax.checkpoint_policies
        named = policies.save_only_these_names(*jlp.CHECKPOINT_NAMES)
        (all_calls, expected), (names_calls, actual) = map(run, (policies.everything_saveable, named))
        assert_same_bytes(actual, expected)
        assert all_calls == names_calls == 6


class TestQuantizedKernel:
    x, w, dy = operands((32, 64, 48))
    formats = {
        "both": ((NVFP4, MXFP8, BLOCK), jlp.MXFP8(), jlp.NVFP4((16, 16))),
        "fprop": ((NVFP4, "dequantized", None), None, jlp.NVFP4((16, 16))),
        "dgrad": ((None, MXFP8, None), jlp.MXFP8(), None),
    }

    @pytest.mark.parametrize("name", often(["both"], formats))
    def test_has_the_forms_that_fprop_and_dgrad_read(self, name):
        mixture, row, column = self.formats[name]
        recipe = jlp.PerGemm(*mixture)
        quantized = jlp.quantize_kernel(self.w, recipe)
        for form, fmt, axis in ((quantized.rowwise, row, -1), (quantized.columnwise, column, -2)):
            assert_same_bytes(form, None if fmt is None else jlp.quantize(self.w, fmt, axis=axis))
        assert quantized.shape == self.w.shape and not quantized.weight_only
        expected = run(recipe, self.x, self.w, self.dy)
        assert_same_bytes(run(recipe, self.x, self.w, self.dy, quantized_kernel=quantized), expected)

    def test_alone_serves_where_fprop_is_quantised(self):
        recipe = jlp.PerGemm(NVFP4, MXFP8, BLOCK)
        quantized = jlp.quantize_kernel(self.w, recipe)

        @jax.jit
        def step(x, dy, quantized):
            y, pullback = jax.vjp(lambda x: jlp.linear(x, None, recipe=recipe, quantized_kernel=quantized), x)
            return y, *pullback(dy)

        assert_same_bytes(step(self.x, self.dy, quantized), run(recipe, self.x, self.w, self.dy)[:2])

    def test_alone_cannot_serve_fprop_in_high_precision(self):
        recipe = jlp.PerGemm(None, MXFP8)
        quantized = jlp.quantize_kernel(self.w, recipe)
        with pytest.raises(ValueError, match="MXFP8 E4M3 1x32 in dgrad for .*, but fprop is in high precision; pass"):
            jlp.linear(self.x, None, recipe=recipe, quantized_kernel=quantized)

    def test_of_another_mixture_is_refused(self):
        quantized = jlp.quantize_kernel(self.w, MXFP8)
        message = "is MXFP8 E4M3 1x32 for .* wants NVFP4 16x16 in fprop and MXFP8 E4M3 1x32 in dgrad for quantised"
        with pytest.raises(ValueError, match=message):
            jlp.linear(self.x, self.w, recipe=jlp.PerGemm(NVFP4, MXFP8), quantized_kernel=quantized)

    def test_is_not_made_for_a_weight_in_high_precision(self):
        with pytest.raises(ValueError, match="keeps the weight of layer '' in high precision"):
            jlp.quantize_kernel(self.w, jlp.PerGemm(wgrad=NVFP4))

    def test_serves_the_layers_of_flax(self):
        recipe = jlp.PerGemm(None, MXFP8, None)
        layer, linen = jlp.nnx.Linear(64, 48, rngs=nnx.Rngs(0)), jlp.linen.Dense(48)
        with jlp.autocast(recipe):
            expected = layer(self.x)
            with jlp.nnx.quantized_kernels(layer):
                assert layer.quantized.get_value().rowwise.format == jlp.MXFP8()
                assert_same_bytes(layer(self.x), expected)
            variables = {"params": {"kernel": self.w, "bias": jnp.zeros(48)}}
            y, made = linen.apply(variables, self.x, mutable="quantized")
            assert made["quantized"]["kernel"].columnwise is None
            assert_same_bytes(linen.apply(variables | made, self.x), y)


SPLIT = [
    (P("a"), P(), P("a")),
    (P("a"), P(None, "b"), P("a", "b")),
    (P(None, "a"), P("a"), P()),
]


class TestTransformations:
    recipe = jlp.PerGemm(MXFP8, BLOCK, UNROTATED)
    x, w, dy = jax.device_get(
        (random_array((2, 128, 64)), random_array((2, 64, 48), "float32", 1), random_array((2, 128, 48), seed=2))
    )

    @functools.cached_property
    def slices(self):
        """Of each slice by itself."""
        results = [run(self.recipe, self.x[i], self.w[i], self.dy[i], None) for i in range(2)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(results))

    def test_vmap_is_the_loop(self):
        mapped = jax.jit(jax.vmap(lambda *a: run(self.recipe, *a, None)))
        assert_same_bytes(mapped(self.x, self.w, self.dy), self.slices)

    def test_an_einsum_is_linear_on_matrices(self):
        x, w, dy = self.x[0].reshape(2, 64, 64), self.w[0].reshape(64, 4, 12), self.dy[0].reshape(2, 64, 4, 12)

        @jax.jit
        def step(x, w, dy):
            y, pullback = jax.vjp(lambda x, w: jlp.einsum("btd,dhk->bthk", x, w, recipe=self.recipe, key=KEY), x, w)
            return y, *pullback(dy)

        y, dx, dw = jax.device_get(step(x, w, dy))
        expected = run(self.recipe, self.x[0], self.w[0], self.dy[0])
        assert_same_bytes((y.reshape(128, 48), dx.reshape(128, 64), dw.reshape(64, 48)), expected)

    @pytest.mark.parametrize("time", [64, 40])  # a part holds whole blocks, or parts are merged
    def test_rows_in_parts_are_tokens(self, time):
        x, dy = jax.device_get((random_array((2, time, 64)), random_array((2, time, 48), seed=2)))
        y, dx, dw = jax.device_get(run(self.recipe, x, self.w[0], dy))
        expected = run(self.recipe, x.reshape(-1, 64), self.w[0], dy.reshape(-1, 48))
        assert_same_bytes((y.reshape(-1, 48), dx.reshape(-1, 64), dw), expected)

    @pytest.mark.parametrize(
        "specs",
        often([SPLIT[1]], SPLIT),
        ids=["rows", "rows and columns", "contracted in fprop"],
    )
    def test_the_bytes_do_not_depend_on_the_mesh(self, specs):
        """Those that are kept for the backward pass are its operands."""
        operands = random_array((256, 128)), random_array((128, 64), "float32", 1), random_array((256, 64), seed=2)

        @jax.jit
        def kept_and_results(x, w, dy):
            y, pullback = jax.vjp(functools.partial(jlp.linear, recipe=jlp.PerGemm(NVFP4, MXFP8, NVFP4)), x, w)
            return jax.tree.leaves(pullback), (y, *pullback(dy))

        mesh = mesh_of((2, 2))
        kept, results = kept_and_results(*(place(v, mesh, s) for v, s in zip(operands, specs, strict=True)))
        expected_kept, expected = kept_and_results(*operands)
        assert len(kept) > 4
        assert_same_bytes(kept, expected_kept)
        for a, e in zip(results, expected, strict=True):
            # A contraction over a split axis adds float32 parts in another order.
            eps = float(jnp.finfo(e.dtype).eps)
            a, e = (np.asarray(v).astype(np.float64) for v in (a, e))
            np.testing.assert_allclose(a, e, rtol=2 * eps, atol=1e-5 * np.abs(e).max())

    def test_in_explicit_mode(self):
        operands = random_array((256, 128)), random_array((128, 64), "float32", 1), random_array((256, 64), seed=2)
        recipe = jlp.PerGemm(NVFP4, None, MXFP8)
        mesh = mesh_of((2,), AxisType.Explicit)
        with jax.set_mesh(mesh):
            placed = [place(v, mesh, s) for v, s in zip(operands, (P("a"), P(), P("a")), strict=True)]
            results = jax.jit(functools.partial(run, recipe))(*placed)
        assert [jax.typeof(r).sharding.spec for r in results] == [P("a", None), P("a", None), P(None, None)]
        assert_same_bytes(jax.device_get(results[0]), run(recipe, *operands)[0])


class TestExperts:
    """Each group is what `linear` computes of its rows."""

    sizes = (40, 0, 1, 64, 33)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", often(["one each"], [n for n in MIXTURES if "tensors" not in n]))
    def test_have_the_gemms_of_linear(self, name):
        """XLA adds products in high precision up in an order that depends on their shape."""
        recipe = jlp.PerGemm(*MIXTURES[name])
        ours, theirs = grouped_results(recipe, self.sizes), loop_of_linear(recipe, self.sizes)
        for own, a, b in zip((*MIXTURES[name], None), ours, theirs, strict=True):
            if isinstance(own, jlp.Recipe):
                assert_same_bytes(a, b)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = np.float32(a), np.float32(b)
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max())

    def test_rotations_that_groups_cannot_have_are_refused(self):
        recipe = jlp.PerGemm(NVFP4, NVFP4, CURRENT)
        with pytest.raises(ValueError, match="rotates the input .*; rows in groups take only NVFP4's rotation"):
            jlp.grouped_matmul(jnp.ones((4, 32)), jnp.ones((1, 32, 16)), jnp.array([4]), recipe=recipe)
