"""`w4afp8` for vLLM's kernel for Hopper: what is trained is what it serves."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.schemes.codes import unpack_words
from tests.checkpoints.weights import assert_same_tensors
from tests.helpers import BY_WEIGHTS_RULE as FMT
from tests.helpers import assert_same_bytes, random_array
from tests.ops.quantize.test_w4afp8 import weight

E4M3, F = ml_dtypes.float8_e4m3fn, np.float32
HOPPER = schemes.by_name("w4afp8", kernel="hopper")
ANY = schemes.by_name("w4afp8")


def served(tensors):
    """vLLM 0.32: `convert_bf16_scales_to_fp8`, and the table of products that CUTLASS packs."""
    n, k = tensors["weight_shape"]
    codes = unpack_words(tensors["weight_packed"], k).astype(np.int64) - 8
    scale = tensors["weight_scale"].astype(F)
    channel = np.maximum(scale.max(1, keepdims=True) / F(448), F(1 / (448 * 512)))
    fp8 = ((scale / channel).astype(E4M3).astype(F) / F(8)).astype(E4M3)
    table = (np.arange(-8, 8) * fp8.astype(np.float64)[..., None]).astype(F).astype(E4M3)  # exact in float32
    groups = codes.reshape(n, k // 128, 128) + 8
    return np.take_along_axis(table.astype(F), groups, -1).reshape(n, k) * (8 * channel)


def finite(seed=0):
    """A weight [128, 512] that a file can hold."""
    w = np.concatenate([weight(seed=seed + i)[7:39] for i in range(4)])
    w[0], w[1, :128] = 0, 0
    return w


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_served_weight_is_the_trained_one(dtype):
    w = finite().astype(jnp.dtype(dtype))
    tensors = HOPPER.compress(w)
    q = jlp.quantize(w, FMT)
    np.testing.assert_array_equal(served(tensors), np.asarray(q.dequantize(jnp.float32)))
    np.testing.assert_array_equal(HOPPER.decompress(tensors, "float32"), np.asarray(q.dequantize(jnp.float32)))
    loaded = HOPPER.load(tensors)
    assert_same_bytes((loaded.data, loaded.scale), (q.data, q.scale))
    assert_same_tensors(HOPPER.store(loaded), tensors)


def test_any_file_is_read_as_it_is_served():
    """Other tools' codes of -8, scales far below their row's largest, rows of zeros."""
    rng = np.random.default_rng(1)
    tensors = ANY.compress(finite(1))
    tensors["weight_packed"] = rng.integers(-(2**31), 2**31, tensors["weight_packed"].shape).astype(np.int32)
    tensors["weight_scale"] = tensors["weight_scale"].copy()
    tensors["weight_scale"][3:40] *= np.exp2(-rng.integers(0, 20, (37, 1))).astype(ml_dtypes.bfloat16)
    tensors["weight_scale"][40:60, 1:] *= ml_dtypes.bfloat16(2.0**-15)
    loaded = HOPPER.load(tensors)
    np.testing.assert_array_equal(served(tensors), np.asarray(loaded.dequantize(jnp.float32)))
    again = HOPPER.store(loaded)
    np.testing.assert_array_equal(served(again), served(tensors))


def test_int4_is_served_as_another_weight():
    w = np.asarray(random_array((128, 1024), seed=2))
    plain = ANY.load(ANY.compress(w)).dequantize(jnp.float32)
    away = np.linalg.norm(served(ANY.compress(w)) - plain) / np.linalg.norm(plain)
    assert 0.02 < away < 0.05


def test_training_multiplies_by_what_is_served():
    recipe = jlp.WeightQAT(FMT, activation_format=jlp.Float8Rows(least_scale=1 / (448 * 512)))
    x, w = random_array((16, 256), seed=3), random_array((256, 128), "float32", 4)

    def loss(w):
        with jlp.autocast(recipe):
            y = jlp.linear(x, w)
        return y.astype(jnp.float32).sum(), y

    (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    tensors = HOPPER.compress(np.asarray(w.T.astype(jnp.bfloat16)))
    a = jlp.quantize(x, recipe.activation_format)
    assert_same_bytes(y, jlp.scaled_matmul(a, HOPPER.load(tensors)))
    expected = a.dequantize(jnp.float32).T @ jnp.ones(y.shape)
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(expected), rtol=2e-2, atol=2e-2)


def test_a_configuration_says_the_same_of_both():
    assert HOPPER.quantization_config([]) == ANY.quantization_config([])
    assert schemes.from_config(HOPPER.quantization_config([])) == ANY


class TestBadInput:
    @pytest.mark.parametrize("options", [{"group_size": 64}, {"group_size": -1}, {"scale_dtype": "float16"}])
    def test_files_that_the_kernel_does_not_take(self, options):
        with pytest.raises(ValueError, match='that kernel needs group_size=128 and scale_dtype="bfloat16"'):
            schemes.by_name("w4afp8", kernel="hopper", **options)

    def test_kernel(self):
        with pytest.raises(ValueError, match='kernel=\'ada\'; needs "any" or "hopper"'):
            schemes.by_name("w4afp8", kernel="ada")

    @pytest.mark.parametrize(
        ("shape", "message"), [((64, 128), "64 rows are not a multiple"), ((128, 192), "192 columns are not")]
    )
    def test_shapes(self, shape, message):
        with pytest.raises(ValueError, match=message):
            HOPPER.compress(np.ones(shape, np.float32))

    def test_arrays_by_another_rule(self):
        q = jlp.quantize(np.ones((128, 128), np.float32), jlp.Float8Rows())
        with pytest.raises(ValueError, match="q has format Float8Rows"):
            HOPPER.store(q)
        with pytest.raises(ValueError, match="q has format Float8Rows.*needs Int4"):
            ANY.store(jlp.quantize(np.ones((128, 128), np.float32), FMT))

    def test_codes_that_no_group_has(self):
        w = np.asarray(random_array((128, 256), "float32", 5))
        q = jlp.quantize(w, jlp.Float8Rows())
        q = jlp.QuantizedArray(q.data, q.scale, None, None, FMT, q.shape, q.dtype, -1, None)
        with pytest.raises(ValueError, match=r"group 0 of row 0 has codes that are not E4M3\(k h\)"):
            HOPPER.store(q)

    def test_scales_that_are_negative(self):
        tensors = ANY.compress(np.ones((128, 128), np.float32))
        tensors["weight_scale"] = -tensors["weight_scale"]
        with pytest.raises(ValueError, match="negative or not finite"):
            HOPPER.load(tensors)
