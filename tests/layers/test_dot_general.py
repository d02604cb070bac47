"""dot_general and einsum: drop-in without a recipe, `linear`'s GEMMs under one, whatever the dimension numbers."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxlowprec as jlp
from tests.helpers import FLOATS, assert_same_bytes, often, random_array
from tests.low_precision import RECIPES

FULL, MXFP8 = jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()
PLAIN = jlp.NVFP4BlockScaling(disable_stochastic_rounding=True)

# lhs shape, rhs shape, dimension numbers
PRODUCTS = {
    "plain": ((32, 64), (64, 48), (((1,), (0,)), ((), ()))),
    "tokens in front": ((2, 16, 64), (64, 48), (((2,), (0,)), ((), ()))),
    "rhs transposed": ((32, 64), (48, 64), (((1,), (1,)), ((), ()))),
    "lhs transposed": ((64, 32), (64, 48), (((0,), (0,)), ((), ()))),
    "batch": ((3, 32, 64), (3, 64, 48), (((2,), (1,)), ((0,), (0,)))),
    "batch behind": ((32, 64, 3), (64, 48, 3), (((1,), (0,)), ((2,), (2,)))),
    "two batches crossed": ((2, 16, 3, 32), (3, 32, 2, 16), (((3,), (1,)), ((0, 2), (2, 0)))),
    "two contractions": ((32, 4, 16), (4, 16, 48), (((1, 2), (0, 1)), ((), ()))),
    "two contractions crossed": ((4, 32, 16), (16, 48, 4), (((0, 2), (2, 0)), ((), ()))),
    "features in two axes": ((2, 16, 64), (64, 4, 12), (((2,), (0,)), ((), ()))),
    "odd sizes": ((7, 50), (50, 21), (((1,), (0,)), ((), ()))),
    "vectors": ((64,), (64,), (((0,), (0,)), ((), ()))),
}
QUANTIZED = [name for name, recipe in RECIPES.items() if recipe and not (recipe.delayed or recipe.roles().ste)]
each_product = pytest.mark.parametrize(("lhs_shape", "rhs_shape", "dims"), PRODUCTS.values(), ids=PRODUCTS)
hard_products = pytest.mark.parametrize(
    "product", often(["two batches crossed", "two contractions crossed", "odd sizes", "vectors"], PRODUCTS)
)

# subscripts, shapes of the operands
EINSUMS = {
    "btd,dhk->bthk": ((2, 8, 32), (32, 4, 16)),
    "bthd,hdk->btk": ((2, 8, 4, 16), (4, 16, 32)),
    "bthd,hdk->bthk": ((2, 8, 4, 16), (4, 16, 32)),
    "bqhd,bkhd->bhqk": ((2, 8, 4, 16), (2, 8, 4, 16)),
    "ij,jk->ki": ((32, 16), (16, 48)),
    "...d,df->...f": ((2, 3, 8, 32), (32, 16)),
    "...ij,...jk->...ik": ((2, 1, 8, 16), (2, 1, 16, 32)),
    "ij,jk": ((32, 16), (16, 48)),
    "ki,jk": ((16, 32), (48, 16)),
    "ij , jk -> i k": ((32, 16), (16, 48)),
    "ijz,jk->ik": ((32, 16, 3), (16, 48)),
    "ii j,jk->ik".replace(" ", ""): ((16, 16, 32), (32, 48)),
    "ij,jk->": ((32, 16), (16, 48)),
    "i,i->": ((64,), (64,)),
}
each_einsum = pytest.mark.parametrize(("subscripts", "shapes"), EINSUMS.items(), ids=EINSUMS)
hard_einsums = pytest.mark.parametrize(
    "subscripts", often(["bthd,hdk->bthk", "...ij,...jk->...ik", "iij,jk->ik", "ij,jk->"], EINSUMS)
)


def operands(*shapes, dtype="bfloat16"):
    return [random_array(shape, dtype, seed) for seed, shape in enumerate(shapes)]


def normal(*shapes):
    return [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]


def assert_close(actual, expected):
    """Within NVFP4's error: two operands with a mean square error near 1 % each (numerics.md 11)."""
    assert actual.shape == expected.shape
    a, e = (np.asarray(v).astype(np.float64) for v in (actual, expected))
    assert np.linalg.norm(a - e) < 0.25 * np.linalg.norm(e)


def with_gradients(function, *args):
    @jax.jit
    def call(*args):
        y, pullback = jax.vjp(function, *args)
        return y, *pullback(np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return jax.device_get(call(*args))


class TestWithoutRecipe:
    @pytest.mark.sampled(7)
    @each_product
    @pytest.mark.parametrize("dtype", often(["bfloat16"], ["bfloat16", "float32"]))
    def test_dot_general_is_jaxs(self, lhs_shape, rhs_shape, dims, dtype):
        args = operands(lhs_shape, rhs_shape, dtype=dtype)
        options = {"precision": "highest", "preferred_element_type": jnp.float32}
        for chosen in ({}, options):
            actual = with_gradients(lambda a, b, o=chosen: jlp.dot_general(a, b, dims, **o), *args)
            expected = with_gradients(lambda a, b, o=chosen: jax.lax.dot_general(a, b, dims, **o), *args)
            assert_same_bytes(actual, expected)

    @pytest.mark.sampled(7)
    @each_einsum
    def test_einsum_is_jnps(self, subscripts, shapes):
        for dtype, options in (
            ("bfloat16", {}),
            ("float32", {"precision": "highest", "preferred_element_type": "float32"}),
        ):
            args = operands(*shapes, dtype=dtype)
            actual = with_gradients(lambda a, b, o=options: jlp.einsum(subscripts, a, b, **o), *args)
            expected = with_gradients(lambda a, b, o=options: jnp.einsum(subscripts, a, b, **o), *args)
            assert_same_bytes(actual, expected)

    def test_integers_and_three_operands_are_served(self):
        a = jnp.arange(6).reshape(2, 3)
        assert_same_bytes(jlp.dot_general(a, a, (((1,), (1,)), ((), ()))), a @ a.T)
        assert_same_bytes(jlp.einsum("ij,kj,kl->il", a, a, a), jnp.einsum("ij,kj,kl->il", a, a, a))

    def test_recipe_none_wins_over_the_context(self):
        a, b = operands((32, 64), (64, 48))
        with jlp.autocast(FULL):
            assert_same_bytes(jlp.dot_general(a, b, (((1,), (0,)), ((), ())), recipe=None), a @ b)
            assert_same_bytes(jlp.einsum("ij,jk->ik", a, b, recipe=None), a @ b)


class TestDotGeneral:
    @hard_products
    def test_approximates_jaxs_with_its_gradients(self, product):
        lhs_shape, rhs_shape, dims = PRODUCTS[product]
        args = normal(lhs_shape, rhs_shape)
        actual = with_gradients(lambda a, b: jlp.dot_general(a, b, dims, recipe=PLAIN), *args)
        expected = with_gradients(lambda a, b: jax.lax.dot_general(a, b, dims), *args)
        if lhs_shape == (64,):  # a single number: its error is that of its terms
            scale = np.linalg.norm(args[0]) * np.linalg.norm(args[1])
            assert abs(float(actual[0]) - float(expected[0])) < 0.25 * scale / 8
            actual, expected = actual[1:], expected[1:]
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e)

    def test_the_plain_product_is_linear(self):
        x, w = operands((32, 64), (64, 48))
        plain = PRODUCTS["plain"][2]
        options = ({}, {"key": jax.random.key(3)}, {"name": "layer"})

        def each_way(product, *given):
            return lambda x, w: jnp.stack([product(x, w, *given, recipe=FULL, **chosen) for chosen in options])

        actual, expected = each_way(jlp.dot_general, plain), each_way(jlp.linear)
        assert_same_bytes(with_gradients(actual, x, w), with_gradients(expected, x, w))

    @pytest.mark.parametrize("product", ["rhs transposed", "lhs transposed", "two contractions crossed"])
    def test_the_order_of_dimensions_keeps_the_operands_bytes(self, product):
        lhs_shape, rhs_shape, dims = PRODUCTS[product]
        lhs, rhs = operands(lhs_shape, rhs_shape)
        ((lc, rc), _) = dims
        x = np.moveaxis(np.asarray(lhs), lc, range(-len(lc), 0)).reshape(32, 64)
        w = np.moveaxis(np.asarray(rhs), rc, range(len(rc))).reshape(64, 48)
        found = jax.jit(lambda: (jlp.dot_general(lhs, rhs, dims, recipe=FULL), jlp.linear(x, w, recipe=FULL)))
        assert_same_bytes(*found())

    @pytest.mark.parametrize("recipe", often(["nvfp4", "fp8_block hybrid float32 scales"], QUANTIZED))
    @pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
    def test_a_kernel_n_by_k_is_quantised_as_it_lies(self, recipe, batch):
        x, w, dy = operands((*batch, 160, 96), (*batch, 96, 128), (*batch, 160, 128))
        axes = tuple(range(len(batch)))

        def gradients(contracted_of_w):
            dims = ((len(batch) + 1,), (contracted_of_w,)), (axes, axes)
            product = functools.partial(jlp.dot_general, dimension_numbers=dims, recipe=RECIPES[recipe])
            return jax.jit(lambda x, w, dy: jax.vjp(functools.partial(product, key=jax.random.key(1)), x, w)[1](dy))

        w, as_it_lies = np.float32(w), gradients(len(batch) + 1)
        dx, dw = as_it_lies(x, np.swapaxes(w, -1, -2), dy)
        assert_same_bytes((dx, np.swapaxes(dw, -1, -2)), gradients(len(batch))(x, w, dy))
        if recipe == "nvfp4":
            assert " transpose(" not in as_it_lies.lower(x, np.swapaxes(w, -1, -2), dy).compile().as_text()

    def test_each_slice_of_a_batch_is_a_tensor_of_its_own(self):
        lhs, rhs = operands((3, 32, 64), (3, 64, 48))

        @jax.jit
        def both():
            alone = jnp.stack([jlp.linear(lhs[i], rhs[i], recipe=FULL) for i in range(3)])
            return jlp.dot_general(lhs, rhs, PRODUCTS["batch"][2], recipe=FULL), alone

        assert_same_bytes(*both())

    @pytest.mark.parametrize("key", [None, 0])
    def test_slices_of_a_batch_do_not_share_random_bits(self, key):
        lhs, rhs = operands((1, 32, 64), (1, 64, 48))
        lhs, rhs, dy = (np.repeat(np.asarray(a), 2, 0) for a in (lhs, rhs, random_array((1, 32, 48), seed=2)))
        key = None if key is None else jax.random.key(key)

        @jax.jit
        def gradients(a, b, dy):
            return jax.vjp(lambda a, b: jlp.dot_general(a, b, PRODUCTS["batch"][2], recipe=FULL, key=key), a, b)[1](dy)

        for gradient in jax.device_get(gradients(lhs, rhs, dy)):
            assert np.any(gradient[0] != gradient[1])

    @pytest.mark.parametrize("preferred", [None, *FLOATS])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_result_has_the_preferred_dtype_or_lhss(self, dtype, preferred):
        x, w = jax.ShapeDtypeStruct((32, 64), dtype), jax.ShapeDtypeStruct((64, 48), jnp.bfloat16)
        plain = PRODUCTS["plain"][2]
        y = jax.eval_shape(lambda x, w: jlp.dot_general(x, w, plain, None, preferred, recipe=FULL), x, w)
        assert y.dtype == (preferred or dtype)

    def test_a_float32_kernel_beside_bfloat16_keeps_its_gradient(self):
        x, w = operands((32, 64), (64, 48))
        y, dx, dw = with_gradients(
            lambda x, w: jlp.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=FULL), x, np.float32(w)
        )
        assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
        assert np.mean(dw == dw.astype(jnp.bfloat16)) < 0.1

    @pytest.mark.parametrize("product", ["plain", "batch", "two contractions", "features in two axes"])
    def test_a_quantised_kernel_serves(self, product):
        lhs_shape, rhs_shape, dims = PRODUCTS[product]
        lhs, rhs = operands(lhs_shape, rhs_shape)
        batch = rhs_shape[: len(dims[1][1])]
        contracted = np.prod([rhs_shape[d] for d in dims[0][1]])
        quantized = jlp.quantize_kernel(np.asarray(rhs).reshape(*batch, contracted, -1), MXFP8)
        product = functools.partial(jlp.dot_general, dimension_numbers=dims, recipe=MXFP8)
        expected = with_gradients(product, lhs, rhs)
        reused = with_gradients(functools.partial(product, quantized_kernel=quantized), lhs, rhs)
        assert_same_bytes(reused, expected)
        alone = jax.jit(lambda lhs, q: product(lhs, None, quantized_kernel=q))(lhs, quantized)
        assert_same_bytes(np.asarray(alone).ravel(), expected[0].ravel())

    def test_takes_what_flax_passes(self):
        assert list(inspect.signature(jlp.dot_general).parameters)[:5] == [
            "lhs",
            "rhs",
            "dimension_numbers",
            "precision",
            "preferred_element_type",
        ]
        x = random_array((8, 32))
        linen_layer = nn.Dense(16, dot_general=jlp.dot_general)
        variables = linen_layer.init(jax.random.key(0), x)
        nnx_layer = nnx.Linear(32, 16, dot_general=jlp.dot_general, rngs=nnx.Rngs(0))
        with jlp.autocast(FULL):
            y = linen_layer.apply(variables, x)
            kernel = variables["params"]["kernel"]
            assert_same_bytes(y, jlp.linear(x.astype(jnp.float32), kernel, recipe=FULL))
            assert_same_bytes(nnx_layer(x), jlp.linear(x.astype(jnp.float32), nnx_layer.kernel[...], recipe=FULL))


class TestEinsum:
    @hard_einsums
    def test_approximates_jnps_with_its_gradients(self, subscripts):
        shapes = EINSUMS[subscripts]
        args = normal(*shapes)
        actual = with_gradients(lambda a, b: jlp.einsum(subscripts, a, b, recipe=PLAIN), *args)
        expected = with_gradients(lambda a, b: jnp.einsum(subscripts, a, b), *args)
        scale = np.linalg.norm(args[0]) * np.linalg.norm(args[1])
        if not expected[0].ndim:
            assert abs(float(actual[0]) - float(expected[0])) < 0.25 * scale
            actual, expected = actual[1:], expected[1:]
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e)

    def test_is_linear_on_matrices(self):
        x, w = operands((32, 64), (64, 48))
        expected = with_gradients(lambda x, w: jlp.linear(x, w, recipe=FULL), x, w)
        actual = with_gradients(lambda x, w: jlp.einsum("tk,kn->tn", x, w, recipe=FULL), x, w)
        assert_same_bytes(actual, expected)

    def test_is_dot_general_with_the_result_transposed(self):
        x, w = operands((2, 16, 3, 32), (3, 32, 2, 16))

        @jax.jit
        def both():
            y = jlp.dot_general(x, w, PRODUCTS["two batches crossed"][2], recipe=FULL)
            return jlp.einsum("aibk,bkaj->jiba", x, w, recipe=FULL), y.transpose(3, 2, 1, 0)

        assert_same_bytes(*both())

    def test_an_outer_product_stays_in_high_precision(self):
        a, b = operands((2, 8, 16), (16,))
        assert_same_bytes(jlp.einsum("bti,i->bti", a, b, recipe=FULL), jnp.einsum("bti,i->bti", a, b))

    def test_the_context_reaches_it(self):
        x, w = operands((32, 64), (64, 48))
        with jlp.autocast(FULL):
            assert_same_bytes(jlp.einsum("ij,jk->ik", x, w), jlp.linear(x, w))


def with_quantized(x, w, quantized, dims, recipe=FULL):
    return jlp.dot_general(x, w, dims, recipe=recipe, quantized_kernel=jlp.quantize_kernel(quantized, FULL))


class TestErrors:
    x, w = operands((32, 64), (64, 48))
    plain = PRODUCTS["plain"][2]

    @pytest.mark.parametrize(
        ("error", "message", "call"),
        [
            (TypeError, "dot_general: recipe=3", lambda x, w, d: jlp.dot_general(x, w, d, recipe=3)),
            (TypeError, "einsum: recipe='fp4'", lambda x, w, d: jlp.einsum("ij,jk->ik", x, w, recipe="fp4")),
            (TypeError, "lhs has dtype int32", lambda x, w, d: jlp.dot_general(x.astype("int32"), w, d, recipe=FULL)),
            (TypeError, "rhs has dtype int8", lambda x, w, d: jlp.dot_general(x, w.astype("int8"), d, recipe=FULL)),
            (ValueError, r"do not fit", lambda x, w, d: jlp.dot_general(x, w.T, d, recipe=FULL)),
            (ValueError, "contracts nothing", lambda x, w, d: jlp.dot_general(x, w, (((), ()), ((), ())), recipe=FULL)),
            (
                TypeError,
                "preferred_element_type=int32",
                lambda x, w, d: jlp.dot_general(x, w, d, preferred_element_type=jnp.int32, recipe=FULL),
            ),
            (
                ValueError,
                "needs two: call it pair by pair",
                lambda x, w, d: jlp.einsum("ij,jk,k", x, w, w, recipe=FULL),
            ),
            (ValueError, "names 3 operands, given 2", lambda x, w, d: jlp.einsum("ij,jk,k", x, w, recipe=FULL)),
            (ValueError, "does not fit an operand of 2", lambda x, w, d: jlp.einsum("ijz,jk->ik", x, w, recipe=FULL)),
            (ValueError, "that no operand has", lambda x, w, d: jlp.einsum("ij,jk->iz", x, w, recipe=FULL)),
            (ValueError, "names an axis twice", lambda x, w, d: jlp.einsum("ij,jk->ii", x, w, recipe=FULL)),
            (ValueError, "do not fit|size", lambda x, w, d: jlp.einsum("ij,kj->ik", x, w, recipe=FULL)),
            (
                ValueError,
                "do not fit",
                lambda x, w, d: jlp.dot_general(x[None], w[None].repeat(2, 0), PRODUCTS["batch"][2], recipe=FULL),
            ),
            (ValueError, "without quantized_kernel=", lambda x, w, d: jlp.dot_general(x, None, d, recipe=FULL)),
            (ValueError, "quantized_kernel= without a recipe", lambda x, w, d: with_quantized(x, w, w, d, None)),
            (ValueError, r"quantized_kernel \(48, 64\) do not fit", lambda x, w, d: with_quantized(x, None, w.T, d)),
            (ValueError, r"quantized_kernel has shape \(64, 32\)", lambda x, w, d: with_quantized(x, w, w[:, :32], d)),
        ],
    )
    def test_name_the_mistake(self, error, message, call):
        with pytest.raises(error, match=message):
            call(self.x, self.w, self.plain)

    @pytest.mark.parametrize(
        "dims",
        [
            (((3,), (0,)), ((), ())),  # modulo the rank it is axis 1
            (((-1,), (0,)), ((), ())),
            (((1,), (2,)), ((), ())),
            (((1,), (-2,)), ((), ())),
            (((1, 1), (0, 0)), ((), ())),
            (((1,), (0,)), ((1,), (0,))),
            (((1,), (0,)), ((2,), (0,))),
            (((1,), (0, 1)), ((), ())),
            (((1,), (0,)), ((0,), ())),
            (((1.0,), (0,)), ((), ())),
            ((("1",), (0,)), ((), ())),
            (((1,), (0,)),),
            "1001",
        ],
        ids=str,
    )
    def test_axes_that_jax_refuses_are_refused(self, dims):
        with pytest.raises((TypeError, ValueError)):
            jax.lax.dot_general(self.x, self.w, dims)
        for recipe in (FULL, jlp.Int4QAT(32)):
            with pytest.raises(TypeError, match="dot_general: dimension_numbers.*needs"):
                jlp.dot_general(self.x, self.w, dims, recipe=recipe)

    def test_contracted_axes_fit_one_by_one(self):
        x, w = operands((4, 8, 32), (32, 8, 16))
        with pytest.raises(ValueError, match="do not fit"):
            jlp.dot_general(x, w, (((1, 2), (0, 1)), ((), ())), recipe=FULL)

    def test_axes_count_for_a_quantised_kernel_too(self):
        for dims in ((((3,), (0,)), ((), ())), (((-1,), (0,)), ((), ())), (((1,), (-1,)), ((), ()))):
            with pytest.raises(TypeError, match="counted from 0 on"):
                with_quantized(self.x, None, self.w, dims)

    def test_numpy_ints_and_lists_are_axes(self):
        dims = (([np.int64(1)], np.array([0])), ([], ()))
        assert_same_bytes(jlp.dot_general(self.x, self.w, dims, recipe=FULL), jlp.linear(self.x, self.w, recipe=FULL))
