"""`precision=` where operands are quantised: which way GEMMs take on NVIDIA GPUs, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.lax import DotAlgorithmPreset, Precision

import jaxlowprec as jlp
from jaxlowprec.ops.checks import checked_precision, wants_float32_sums
from jaxlowprec.ops.grouped_matmul.api import multiply_within_groups, quantize_groups
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.helpers import assert_same_bytes, random_array

HIGHEST = ["highest", "float32", "high", Precision.HIGHEST, Precision.HIGH, ("highest", "highest"), ("default", "high")]
FASTEST = [None, "default", "fastest", Precision.DEFAULT, ("default", "default"), "BF16_BF16_F32"]
SLOW, FAST = "float32_sums = true", "float32_sums = false"
X, W = jnp.ones((32, 256), jnp.bfloat16), jnp.ones((256, 64))
RECIPE = jlp.Float8CurrentScaling()


def gemms(function, *args, capability=9.0):
    """The attributes of the GEMMs that a function lowers to."""
    with claiming_cuda(capability):
        calls = custom_calls(function, *args)
    return [call.attributes for call in calls if call.target == "jaxlowprec_scaled_matmul"]


def with_gradients(layer):
    def run(x, *weights):
        y, pullback = jax.vjp(layer, x, *weights)
        return y, pullback(y)

    return run


def quantized(fmt, rows):
    return jlp.quantize(random_array((rows, 256), "float32", rows), fmt)


class TestValues:
    @pytest.mark.parametrize("precision", HIGHEST, ids=str)
    def test_that_ask_for_float32_sums(self, precision):
        assert wants_float32_sums(checked_precision("linear", precision))

    @pytest.mark.parametrize("precision", FASTEST, ids=str)
    def test_that_do_not(self, precision):
        assert not wants_float32_sums(checked_precision("linear", precision))

    def test_are_hashable_and_jaxs(self):
        assert checked_precision("linear", ["high", Precision.DEFAULT]) == (Precision.HIGH, Precision.DEFAULT)
        assert checked_precision("linear", "F32_F32_F32") is DotAlgorithmPreset.F32_F32_F32

    @pytest.mark.parametrize("precision", ["fast", 3, True, ("highest",), ("highest", 3), ["high"] * 3], ids=str)
    def test_others_are_refused_by_every_function(self, precision):
        q, sizes = quantized(jlp.Float8Tensor(), 32), jnp.array([32])
        dims = (((1,), (0,)), ((), ()))
        for who, call in {
            "scaled_matmul": lambda: jlp.scaled_matmul(q, q, precision=precision),
            "linear": lambda: jlp.linear(X, W, recipe=RECIPE, precision=precision),
            "dot_general": lambda: jlp.dot_general(X, W, dims, precision, recipe=RECIPE),
            "einsum": lambda: jlp.einsum("td,dn->tn", X, W, precision=precision, recipe=RECIPE),
            "grouped_matmul": lambda: jlp.grouped_matmul(X, W[None], sizes, recipe=RECIPE, precision=precision),
        }.items():
            with pytest.raises(ValueError, match=rf"{who}: precision=.*; needs None, a jax.lax.Precision or its name"):
                call()


class TestScaledMatmul:
    FORMATS = (jlp.Float8Tensor(), jlp.Float8Block(), jlp.MXFP8(), jlp.MXFP4(), jlp.NVFP4())

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    @pytest.mark.parametrize("capability", [8.9, 9.0, 10.0])
    def test_operands_are_decoded(self, fmt, capability):
        """The attribute, and the workspace of the way that is taken."""
        a, b = quantized(fmt, 32), quantized(fmt, 64)
        with claiming_cuda(capability):
            (call,) = custom_calls(lambda a, b: jlp.scaled_matmul(a, b, precision="highest"), a, b)
        assert SLOW in call.attributes and f'scaling = "{fmt.scaling}"' in call.attributes  # FP8 blocks are not made MX
        decoded = 2 * 256 * (32 + 64)
        assert call.results[1] == f"{decoded + (32 << 20) + 256}xui8"
        (fast,) = gemms(lambda a, b: jlp.scaled_matmul(a, b), a, b, capability=capability)
        assert FAST in fast

    def test_a_program_for_any_gpu(self):
        a = quantized(jlp.Float8Block(), 32)
        assert SLOW in gemms(lambda a: jlp.scaled_matmul(a, a, precision="highest"), a, capability=None)[0]

    @pytest.mark.parametrize("capability", [9.0, None])
    def test_blocks_without_an_exact_bfloat16(self, capability):
        a = quantized(jlp.Float8Block(power_of_two=False), 32)
        assert gemms(lambda a: jlp.scaled_matmul(a, a, precision="highest"), a, capability=capability) == []
        with pytest.raises(NotImplementedError, match='scaled_matmul: implementation="ffi": .*not powers of two'):
            gemms(
                lambda a: jlp.scaled_matmul(a, a, precision="highest", implementation="ffi"), a, capability=capability
            )
        assert len(gemms(lambda a: jlp.scaled_matmul(a, a, implementation="ffi"), a, capability=capability)) == 1

    def test_vmap_and_jit(self):
        a, b = (jlp.quantize(jnp.ones((3, rows, 256)), jlp.Float8Tensor()) for rows in (32, 64))
        multiply = jax.jit(jax.vmap(lambda a, b: jlp.scaled_matmul(a, b, precision="highest")))
        (call,) = gemms(multiply, a, b)
        assert SLOW in call

    def test_a_plain_operand(self):
        """Weight-only products have float32 sums anyway."""
        q = quantized(jlp.NVFP4(), 64)
        assert_same_bytes(jlp.scaled_matmul(X, q, precision="highest"), jlp.scaled_matmul(X, q))
        with pytest.raises(ValueError, match="scaled_matmul: precision="):
            jlp.scaled_matmul(X, q, precision="fast")


class TestLayers:
    """All three GEMMs follow `precision`."""

    def both(self, layer_of, *args, recipe=RECIPE):
        for precision, wanted in (("highest", SLOW), (None, FAST)):
            with jlp.autocast(recipe):
                found = gemms(with_gradients(layer_of(precision)), *args)
            assert len(found) == 3 and all(wanted in attributes for attributes in found)

    @pytest.mark.parametrize("recipe", [RECIPE, jlp.Float8BlockScaling(), jlp.NVFP4BlockScaling()], ids=repr)
    @pytest.mark.parametrize("shape", [(32, 256), (2, 128, 256)], ids=str)
    def test_linear(self, recipe, shape):
        x = jnp.ones(shape, jnp.bfloat16)
        self.both(lambda precision: lambda x, w: jlp.linear(x, w, precision=precision), x, W, recipe=recipe)

    def test_dot_general(self):
        dims = (((1,), (0,)), ((), ()))
        self.both(lambda precision: lambda x, w: jlp.dot_general(x, w, dims, precision), X, W)

    def test_einsum(self):
        self.both(lambda precision: lambda x, w: jlp.einsum("td,dn->tn", x, w, precision=precision), X, W)

    def test_grouped_matmul(self):
        sizes = jnp.array([20, 12])
        w = jnp.stack([W, W])
        self.both(lambda precision: lambda x, w: jlp.grouped_matmul(x, w, sizes, precision=precision), X, w)

    def test_ragged_dot(self):
        sizes = jnp.array([20, 12])
        self.both(lambda precision: lambda x, w: jlp.ragged_dot(x, w, sizes, precision), X, jnp.stack([W, W]))

    @pytest.mark.parametrize(
        "layer",
        [
            lambda p: jlp.linen.Dense(64, precision=p),
            lambda p: jlp.linen.DenseGeneral(64, precision=p),
            lambda p: jlp.linen.Einsum((256, 64), "td,dn->tn", precision=p),
            lambda p: nn.Dense(64, precision=p, dot_general=jlp.dot_general),
        ],
        ids=["Dense", "DenseGeneral", "Einsum", "Flax's own"],
    )
    def test_linen(self, layer):
        variables = layer(None).init(jax.random.key(0), X)
        self.both(lambda precision: lambda x, v: layer(precision).apply(v, x), X, variables)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "layer",
        [
            lambda **options: jlp.nnx.Linear(256, 64, **options),
            lambda **options: jlp.nnx.LinearGeneral(256, 64, **options),
            lambda **options: jlp.nnx.Einsum("td,dn->tn", (256, 64), (64,), **options),
        ],
        ids=["Linear", "LinearGeneral", "Einsum"],
    )
    def test_nnx(self, layer):
        def of(precision):
            graph, _ = nnx.split(layer(precision=precision, rngs=nnx.Rngs(0)), nnx.Param)
            return lambda x, parameters: nnx.merge(graph, parameters)(x)

        _, parameters = nnx.split(layer(rngs=nnx.Rngs(0)), nnx.Param)
        self.both(of, X, parameters)

    def test_gemms_that_a_recipe_leaves_in_high_precision(self):
        recipe = jlp.Float8CurrentScaling(backward_override="high_precision")
        with claiming_cuda(9.0):
            step = with_gradients(lambda x, w: jlp.linear(x, w, recipe=recipe, precision="highest"))
            text = jax.jit(step).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
        assert SLOW in text and text.count("precision = [HIGHEST, HIGHEST]") == 2  # dgrad and wgrad

    def test_without_a_recipe_it_is_jaxs(self):
        text = jax.jit(lambda x, w: jlp.linear(x, w, recipe=None, precision="highest")).lower(X, W).as_text()
        assert "precision = [HIGHEST, HIGHEST]" in text


def test_default_matmul_precision_is_for_high_precision():
    with jax.default_matmul_precision("highest"):
        found = gemms(with_gradients(lambda x, w: jlp.linear(x, w, recipe=RECIPE)), X, W)
    assert len(found) == 3 and all(FAST in attributes for attributes in found)


@pytest.mark.parametrize("implementation", ["reference", "portable"])
@pytest.mark.parametrize("fmt", TestScaledMatmul.FORMATS, ids=str)
def test_programs_without_kernels_do_not_depend_on_it(fmt, implementation):
    """Neither dense products nor gradients of groups. CPUs would refuse this precision."""
    options = {"rowwise": False, "columnwise": True}
    a, (_, columns) = quantized(fmt, 32), quantize_groups(np.ones((32, 64)), np.array([20, 12]), fmt, **options)

    def products(a, columns):
        within = multiply_within_groups(columns, columns, jnp.float32, implementation)
        return jlp.scaled_matmul(a, a, implementation=implementation), within

    def lowered():
        return jax.jit(lambda *operands: products(*operands)).lower(a, columns).as_text()

    by_default = lowered()
    with jax.default_matmul_precision("F16_F16_F32"):
        assert lowered() == by_default


@pytest.mark.parametrize(
    "recipe", [RECIPE, jlp.Float8BlockScaling(), jlp.MXFP8BlockScaling(), jlp.NVFP4BlockScaling()], ids=repr
)
def test_the_cpus_program_does_not_depend_on_it(recipe):
    key = np.array([1, 2], np.uint32)

    def step(precision):
        layer = with_gradients(lambda x, w: jlp.linear(x, w, recipe=recipe, key=key, precision=precision))
        return jax.jit(layer).lower(X, W).as_text()

    assert step("highest") == step(None)
