"""JAX's own quantiser, that of `jax.nn.scaled_dot_general`: it gives these bytes, and its products take them.

Two rules differ. JAX keeps the sign of zeros, whose code is 0 here (numerics.md 1). For NVFP4 it divides, by the
tensor's scale and then by the block's, where numerics.md 2 multiplies by a reciprocal: so where a number is halfway
between two codes or two scales, each side may choose another.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import random_array
from tests.products import assert_is_product, decoded

FORMATS = {"mxfp8": jlp.MXFP8(), "mxfp4": jlp.MXFP4(), "nvfp4": jlp.NVFP4()}
SHAPE = (256, 1024)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason=f"JAX {jax.__version__} has no MXFP4, and no products of blocks on CPUs"
)


def arrays(dtype):
    """Normal numbers, and others with ties, underflowing blocks and outliers among them. Some are halfway."""
    for seed in (10, 20):
        yield np.random.default_rng(seed).standard_normal(SHAPE).astype(jnp.dtype(dtype))
        yield np.asarray(random_array(SHAPE, dtype, seed))


def config(mode, q):
    """JAX's configuration of a format, with the tensor scale of a quantised array where it has one."""
    return jax.nn.get_scaled_dot_general_config(mode, None if q.amax is None else (q.amax / 2688).reshape(1))


@pytest.fixture(scope="module")
def quantizer():
    """JAX's function, which is not public: (x [B, M, K], configuration) -> codes, scales."""
    name = "jax._src.cudnn.scaled_matmul_stablehlo"
    try:
        return importlib.import_module(name).quantize
    except (ImportError, AttributeError):
        pytest.skip(f"JAX {jax.__version__} has no {name}.quantize")


def by_jax(quantizer, x, mode, q):
    """Codes and scales as bytes, one of each element and block; zeros without their sign."""
    found = jax.jit(lambda x: quantizer(x, config(mode, q)))(x[None])
    codes, scales = (np.array(leaf)[0].view(np.uint8) for leaf in found)
    codes[x == 0] = 0
    return codes, scales


def as_bytes(q):
    """The same of an array of this library."""
    data, scale = (np.asarray(leaf).view(np.uint8) for leaf in (q.data, q.scale))
    return (np.stack([data & 15, data >> 4], axis=-1).reshape(SHAPE) if q.format.packed else data), scale


def assert_are_halfway(exact, a, b):
    """Each exact number is in the middle between those that both sides chose, as far as float32 can tell."""
    np.testing.assert_allclose(exact, (a + b) / 2, rtol=2**-22)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
class TestQuantizer:
    @pytest.mark.parametrize("mode", ["mxfp8", "mxfp4"])
    def test_mx_bytes_are_the_same(self, quantizer, mode, dtype):
        for x in arrays(dtype):
            q = jlp.quantize(x, FORMATS[mode])
            for theirs, ours in zip(by_jax(quantizer, x, mode, q), as_bytes(q), strict=True):
                np.testing.assert_array_equal(theirs, ours)

    def test_nvfp4_bytes_differ_only_halfway(self, quantizer, dtype):
        for x in arrays(dtype):
            q = jlp.quantize(x, FORMATS["nvfp4"])
            (theirs, their_scales), (ours, our_scales) = by_jax(quantizer, x, "nvfp4", q), as_bytes(q)
            exact = np.abs(np.float64(x)).reshape(256, 64, 16) / (np.float64(q.amax) / 2688)
            scales = [np.float64(s.view(jnp.float8_e4m3fn)) for s in (their_scales, our_scales)]
            other_scale = their_scales != our_scales
            assert_are_halfway(exact.max(axis=-1)[other_scale] / 6, *(s[other_scale] for s in scales))

            codes = [v.reshape(exact.shape) for v in (theirs, ours)]
            other = (codes[0] != codes[1]) & ~other_scale[..., None]
            of_codes = np.broadcast_to(scales[1][..., None], exact.shape)[other]
            assert_are_halfway(exact[other], *(E2M1[code[other] & 7] * of_codes for code in codes))
            np.testing.assert_array_equal(codes[0][other] & 8, codes[1][other] & 8)
            assert other.mean() < 0.01 and other_scale.mean() < 0.03


@pytest.mark.parametrize("mode", FORMATS)
class TestProducts:
    def operands(self, mode):
        found = (random_array((rows, 256), "float32", rows) for rows in (48, 80))
        return [(x, jlp.quantize(x, FORMATS[mode])) for x in found]

    def test_take_the_same_arrays(self, mode):
        """`jax.nn.scaled_matmul` of codes and scales that were made here."""
        quantized = [q for _, q in self.operands(mode)]
        element = jnp.float4_e2m1fn if FORMATS[mode].packed else jnp.float8_e4m3fn
        codes = [jax.lax.bitcast_convert_type(q.data, element).reshape(1, *q.shape) for q in quantized]
        y = np.asarray(jax.nn.scaled_matmul(*codes, *(q.scale[None] for q in quantized))[0])
        for q in quantized:
            y = y if q.amax is None else y * (np.asarray(q.amax) / np.float32(2688))
        assert_is_product(y, decoded(quantized[0]), decoded(quantized[1]).T)

    def test_of_unquantised_operands_are_the_same(self, mode):
        """`jax.nn.scaled_dot_general`, which quantises. These numbers have no codes halfway."""
        (x, a), (w, b) = self.operands(mode)
        configs = [config(mode, q) for q in (a, b, a)]
        y = jax.nn.scaled_dot_general(x, w, (((1,), (1,)), ((), ())), configs=configs)
        assert_is_product(y, decoded(a), decoded(b).T)
