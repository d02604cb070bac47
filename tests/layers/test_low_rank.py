"""Weights with low-rank adapters, in `linear`, `dot_general` and `einsum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.models.lora import Adapter, LoRAKernel
from tests.helpers import assert_same_bytes, random_array

pytestmark = pytest.mark.sampled(5)

X, W, BIAS = random_array((2, 8, 64)), random_array((64, 48), "float32", 1) * 0.1, random_array((48,), "float32", 2)
A, B = random_array((64, 4), "bfloat16", 3) * 0.1, random_array((4, 48), "bfloat16", 4)
ADAPTER = Adapter(A, B, alpha=8.0)
KERNELS = {
    "array": W,
    "nvfp4": jlp.quantize(W, jlp.NVFP4(), axis=-2),
    "mxfp4": jlp.quantize(W, jlp.MXFP4(), axis=-2),
    "mxfp8": jlp.quantize(W, jlp.MXFP8(), axis=-2),
    "int4": jlp.quantize(W, jlp.Int4(32), axis=-2),
}
by_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
LAST = (((2,), (0,)), ((), ()))


def as_written(y, x=X, adapter=ADAPTER):
    """y plus alpha / rank (x a) b, step by step."""
    added = (x @ adapter.a.astype(x.dtype)) @ adapter.b.astype(x.dtype)
    scale = adapter.alpha / adapter.a.shape[-1]
    return (y.astype(jnp.float32) + scale * added.astype(jnp.float32).reshape(y.shape)).astype(y.dtype)


def in_float32(kernel):
    return jlp.dequantize(kernel, dtype=jnp.float32) if isinstance(kernel, jlp.QuantizedArray) else kernel


@by_kernel
class TestProducts:
    def test_are_those_of_the_weight_plus_the_adapters(self, kernel):
        adapted = LoRAKernel(kernel, ADAPTER)
        expected = as_written(jlp.linear(X, kernel, BIAS))
        assert_same_bytes(jlp.linear(X, adapted, BIAS), expected)
        expected = as_written(jlp.linear(X, kernel))
        assert_same_bytes(jlp.dot_general(X, adapted, LAST, preferred_element_type=jnp.bfloat16), expected)
        np.testing.assert_allclose(jlp.einsum("btk,kn->btn", X, adapted), expected, rtol=0.02, atol=0.02)

    def test_a_vector_is_multiplied_too(self, kernel):
        y = jlp.linear(X[0, 0], LoRAKernel(kernel, ADAPTER))
        np.testing.assert_allclose(y, jlp.linear(X, LoRAKernel(kernel, ADAPTER))[0, 0], rtol=0.02, atol=0.02)

    def test_gradients_reach_the_adapter_and_the_inputs(self, kernel):
        x = X.astype(jnp.float32)
        adapter = jax.tree.map(lambda factor: factor.astype(jnp.float32), ADAPTER)

        def loss(adapter, x):
            return jnp.sum(jnp.sin(jlp.linear(x, LoRAKernel(kernel, adapter))))

        def merged(adapter, x):
            weight = in_float32(kernel) + adapter.alpha / 4 * adapter.a @ adapter.b
            return jnp.sum(jnp.sin(jnp.matmul(x, weight, precision="highest")))

        actual, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(adapter, x) for f in (loss, merged))
        jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-3), actual, expected)

    def test_merged_is_the_sum_rounded_once(self, kernel):
        added = np.matmul(np.float64(A), np.float64(B)) * 2
        expected = np.asarray(in_float32(kernel), np.float64) + added
        adapted = LoRAKernel(kernel, ADAPTER)
        np.testing.assert_allclose(adapted.merged(jnp.float32), expected, rtol=1e-5, atol=1e-6)
        assert_same_bytes(adapted.merged(jnp.bfloat16), adapted.merged(jnp.float32).astype(jnp.bfloat16))
        assert adapted.merged().dtype == adapted.dtype == jnp.float32

    def test_is_a_tree(self, kernel):
        adapted = LoRAKernel(kernel, ADAPTER)
        leaves, structure = jax.tree.flatten(adapted)
        assert_same_bytes(jlp.linear(X, jax.tree.unflatten(structure, leaves)), jlp.linear(X, adapted))
        assert (adapted.shape, adapted.ndim, adapted.size) == ((64, 48), 2, 64 * 48)


class TestUnderARecipe:
    @pytest.mark.parametrize("recipe", [jlp.NVFP4BlockScaling(), jlp.MXFP8BlockScaling()], ids=["nvfp4", "mxfp8"])
    def test_the_weight_follows_it_and_the_adapter_does_not(self, recipe):
        with jlp.autocast(recipe):
            assert_same_bytes(jlp.linear(X, LoRAKernel(W, ADAPTER)), as_written(jlp.linear(X, W)))

    def test_delayed_scaling_keeps_its_state(self):
        recipe = jlp.DelayedScaling()
        state = jlp.delayed_scaling.init_state(recipe)
        y, after = jlp.linear(X, LoRAKernel(W, ADAPTER), recipe=recipe, state=state)
        expected, expected_after = jlp.linear(X, W, recipe=recipe, state=state)
        assert_same_bytes((y, after), (as_written(expected), expected_after))

    def test_a_quantised_weight_refuses_one_for_training(self):
        with pytest.raises(ValueError, match="a loaded kernel needs no recipe"):
            jlp.linear(X, LoRAKernel(KERNELS["nvfp4"], ADAPTER), recipe=jlp.NVFP4BlockScaling(), name="up")


class TestAxes:
    def test_a_transposed_weight_has_the_transposed_adapter(self):
        dims = (((2,), (1,)), ((), ()))
        y = jlp.dot_general(X, LoRAKernel(W, ADAPTER).mT, dims, preferred_element_type=jnp.bfloat16)
        np.testing.assert_allclose(y, jlp.linear(X, LoRAKernel(W, ADAPTER)), rtol=0.02, atol=0.02)

    def test_a_kernel_of_several_axes_is_one_matrix(self):
        adapted = LoRAKernel(W.reshape(64, 6, 8), ADAPTER)
        y = jlp.dot_general(X, adapted, LAST)
        assert_same_bytes(y.reshape(2, 8, 48), jlp.dot_general(X, LoRAKernel(W, ADAPTER), LAST))
        x, adapted = X.reshape(2, 8, 4, 16), LoRAKernel(W.reshape(4, 16, 48), ADAPTER)
        y = jlp.dot_general(x, adapted, (((2, 3), (0, 1)), ((), ())), preferred_element_type=jnp.bfloat16)
        np.testing.assert_allclose(y, jlp.linear(X, LoRAKernel(W, ADAPTER)), rtol=0.02, atol=0.02)

    @pytest.mark.parametrize("quantized", [False, True], ids=["array", "int4"])
    def test_a_stack_is_a_batch(self, quantized):
        x, stack = X.astype(jnp.float32), jnp.stack([W, -W])
        kernel = jlp.quantize(stack, jlp.Int4(32), axis=-2) if quantized else stack
        adapted = LoRAKernel(kernel, Adapter(jnp.stack([A, -A]), jnp.stack([B, 2 * B]), 8.0))
        y = jlp.dot_general(x, adapted, (((2,), (1,)), ((0,), (0,))))
        scanned = jax.lax.scan(lambda _, xs: (None, jlp.linear(*xs)), None, (x, adapted))[1]
        np.testing.assert_allclose(y, scanned, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(jlp.einsum("btk,bkn->btn", x, adapted), scanned, rtol=1e-4, atol=1e-4)


class TestErrors:
    @pytest.mark.parametrize(
        ("adapter", "said"),
        [
            (Adapter(A[:32], B, 1.0), r"adapter.a \(32, 4\) and adapter.b \(4, 48\) for a kernel of shape \(64, 48\)"),
            (Adapter(A, B[:2], 1.0), r"needs \[..., K, rank\] and \[..., rank, N\]"),
            (Adapter(A[0], B, 1.0), r"adapter.a \(4,\)"),
            (Adapter(A.astype(jnp.int32), B, 1.0), "adapter of int32 and bfloat16; needs bfloat16"),
            ((A, B), "needs a jaxlowprec.lora.Adapter"),
        ],
        ids=["K", "rank", "vector", "integers", "no adapter"],
    )
    def test_an_adapter_that_does_not_fit(self, adapter, said):
        for call in (
            lambda kernel: jlp.linear(X, kernel),
            lambda kernel: jlp.dot_general(X, kernel, LAST),
            lambda kernel: jlp.einsum("btk,kn->btn", X, kernel),
            LoRAKernel.merged,
        ):
            with pytest.raises((TypeError, ValueError), match=said):
                call(LoRAKernel(W, adapter))

    def test_products_of_no_matrix_of_the_adapter(self):
        square = LoRAKernel(W.reshape(8, 8, 48), ADAPTER)
        with pytest.raises(ValueError, match=r"needs a kernel \[batch..., contracted..., free...\]"):
            jlp.dot_general(X[..., :8], square, (((2,), (1,)), ((), ())))
        with pytest.raises(ValueError, match="whose K and N are whole axes of it"):
            jlp.einsum("btk,kan->btan", X[..., :32], LoRAKernel(W.reshape(32, 6, 16), ADAPTER))
