"""What products with 4-bit weights become on NVIDIA GPUs, read off the lowered code: nothing here runs on one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.epilogue import Epilogue
from jaxlowprec.ops.scaled_matmul import cuda
from jaxlowprec.ops.weight_only_matmul import portable
from jaxlowprec.ops.weight_only_matmul.op import WeightOnlySpec
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda, custom_calls
from tests.cuda_without_gpu.gemm_calls import matmul_call
from tests.eager import evaluated
from tests.helpers import FLOATS, ONE_OF_EACH, often, random_array


class TestIntegersByFourBits:
    """8-bit integers by rows are multiplied by the library's own kernel; epilogues are XLA's where a GEMM's are."""

    @pytest.mark.parametrize(
        ("fmt", "k", "scales"),
        [
            (jlp.Int4(128), 256, "48x2xbf16"),
            (jlp.Int4(32, scale_dtype="float16"), 160, "48x5xf16"),
            (jlp.MXFP4(), 140, "48x5xf8E8M0FNU"),
            (jlp.MXFP4((32, 32)), 160, "48x5xf8E8M0FNU"),
        ],
        ids=str,
    )
    def test_operands(self, fmt, k, scales):
        """Rows of activations go as they are, those of the weight in whole 16s, each with its own scales."""
        for capability, m in itertools.product((8.0, 8.9, 9.0, 10.0, 12.0, None), (1, 70)):
            call = matmul_call(jlp.Int8Rows("bfloat16"), fmt, m, k, 33, capability)
            padded = -(-k // 32) * 32
            assert call.operands == [f"{m}x{padded}xi8", f"{m}x1xf32", f"48x{padded // 2}xui8", scales]
            assert call.results == [f"{m}x48xbf16", "256xui8"]
            assert "column_major" in call.attributes

    def test_batches(self):
        call = matmul_call(jlp.Int8Rows(), jlp.MXFP4((32, 32)), 5, 64, 48, 9.0, (3,))
        assert call.operands == ["3x5x64xi8", "3x5x1xf32", "3x48x32xui8", "3x48x2xf8E8M0FNU"]

    def test_epilogues(self):
        onto = jnp.ones((8, 48), jnp.bfloat16)
        for options, result in (
            ({"accumulate": onto}, "bf16"),
            ({"accumulate": onto, "preferred_element_type": jnp.float32}, "f32"),
            ({"bias": jnp.ones(48)}, "f32"),
            ({"activation": "gelu"}, "f32"),
            ({"preferred_element_type": jnp.float16}, "f32"),
        ):
            call = matmul_call(jlp.Int8Rows(), jlp.Int4(64), 8, 64, 48, 9.0, **options)
            assert call.results[0] == f"8x48x{result}"
            assert ("8x48xbf16" in call.operands) == (result == "bf16")

    def test_a_gpu_without_the_instructions(self):
        x, w = jlp.quantize(jnp.ones((16, 64)), jlp.Int8Rows()), jlp.quantize(jnp.ones((32, 64)), jlp.MXFP4())
        with claiming_cuda(7.5):
            assert custom_calls(jlp.scaled_matmul, x, w) == []
            with pytest.raises(NotImplementedError, match="below compute capability 8.0"):
                custom_calls(functools.partial(jlp.scaled_matmul, implementation="ffi"), x, w)

    def test_scales_of_tiles_are_those_of_their_lines(self):
        q = evaluated(jlp.quantize)(random_array((70, 96), "float32", 1), jlp.MXFP4((32, 32)))
        scale, fmt = cuda._by_lines(q.scale, q.format, 70)
        assert fmt == jlp.MXFP4() and scale.dtype == q.scale.dtype
        for row in range(70):
            np.testing.assert_array_equal(np.asarray(scale)[row], np.asarray(q.scale)[row // 32])


class TestWeightOnly:
    """Few rows of bfloat16 by NVFP4 or Int4 are the library's own kernel's, all others XLA's GEMM."""

    KERNEL = (
        (jlp.NVFP4(), ["64x64xui8", "64x8xf8E4M3FN", "f32"]),
        (jlp.NVFP4((16, 16)), ["64x64xui8", "4x8xf8E4M3FN", "f32"]),
        (jlp.Int4(32), ["64x64xui8", "64x4xbf16"]),
        (jlp.Int4(64, symmetric=False), ["64x64xui8", "64x2xbf16", "64x2xui8"]),
    )

    def calls(self, fmt, m, capability=9.0, dtype="bfloat16", batch=(), **options):
        x, w = jnp.ones((*batch, m, 128), dtype), jnp.ones((64, 128), jnp.bfloat16)
        q = jax.eval_shape(lambda: jlp.quantize(w.astype(fmt.scale_dtype) if fmt.element == "int4" else w, fmt))
        with claiming_cuda(capability):
            return custom_calls(lambda x, q: jlp.scaled_matmul(x, q, **options), x, q)

    @pytest.mark.parametrize(("fmt", "weight"), KERNEL, ids=str)
    def test_few_rows(self, fmt, weight):
        for capability in (8.0, 9.0, 10.0, None):
            (call,) = self.calls(fmt, 16, capability)
            assert call.target == "jaxlowprec_weight_only_matmul"
            assert call.operands == ["16x128xbf16", *weight]
            assert call.results[0] == "16x64xbf16"
            assert f"asymmetric = {str(len(weight) == 3 and fmt.element == 'int4').lower()}" in call.attributes
        assert self.calls(fmt, 2, batch=(8,))[0].operands[0] == "16x128xbf16"

    def test_the_kernel_rounds_sums_and_xla_applies_other_epilogues(self):
        fmt = jlp.Int4(32)
        for options, result in (
            ({"preferred_element_type": jnp.float32}, "f32"),
            ({"preferred_element_type": jnp.float16}, "f16"),
            ({"bias": jnp.ones(64)}, "f32"),
            ({"activation": "gelu"}, "f32"),
            ({"accumulate": jnp.ones((16, 64), jnp.bfloat16)}, "f32"),
        ):
            (call,) = self.calls(fmt, 16, **options)
            assert call.results[0] == f"16x64x{result}"

    @pytest.mark.parametrize(
        ("fmt", "m", "dtype", "why"),
        [
            (jlp.Int4(32), 17, "bfloat16", "lhs has more than 16 rows"),
            (jlp.Int4(32), 1, "float32", "lhs is not bfloat16: cast it"),
            (jlp.Int4(16), 1, "bfloat16", "groups that are not a multiple of 32"),
            (jlp.Int4(32, scale_dtype="float16"), 1, "bfloat16", "float16 scales"),
            (jlp.MXFP4(), 1, "bfloat16", "neither NVFP4 nor Int4"),
        ],
        ids=str,
    )
    def test_the_others(self, fmt, m, dtype, why):
        assert self.calls(fmt, m, dtype=dtype) == []
        with pytest.raises(NotImplementedError, match=f"scaled_matmul: .*{why}.*implementation=None"):
            self.calls(fmt, m, dtype=dtype, implementation="ffi")

    def test_a_gpu_without_bfloat16_tensor_cores(self):
        assert self.calls(jlp.NVFP4(), 1, 7.5) == []


WEIGHTS = (*ONE_OF_EACH, jlp.Int4(32), jlp.Int4(32, False, "float16"))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    often(
        [*((fmt, "bfloat16") for fmt in WEIGHTS), (WEIGHTS[-1], "float16"), (WEIGHTS[0], "float32")],
        list(itertools.product(WEIGHTS, FLOATS)),
        2,
    ),
    ids=str,
)
def test_xlas_gemm_of_the_decoded_weight_is_the_product(fmt, dtype):
    """Run on the CPU: what it computes is the same on a GPU."""
    x, w = random_array((5, 160), dtype, 1), random_array((40, 160), seed=2)
    w = np.asarray(w).astype(jnp.dtype(fmt.scale_dtype)) if fmt.element == "int4" else w
    q = evaluated(jlp.quantize)(w, fmt)
    bias, epilogue = random_array((40,), "float32", 3), Epilogue(True, False, "gelu", False, jnp.float32)
    spec = WeightOnlySpec(fmt, False, False, True, epilogue)
    multiply = jax.jit(functools.partial(portable.decoded_matmul, spec))
    (y,) = multiply(x, q.data, q.scale, q.amax, q.zero_point, [bias])
    expected = evaluated(jlp.scaled_matmul)(x, q, bias, activation="gelu", preferred_element_type=jnp.float32)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
