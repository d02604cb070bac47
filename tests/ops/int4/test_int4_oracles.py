"""Int4 against compressed-tensors, which writes and reads the checkpoints, and the rule of slime's trainer in torch."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, random_array

torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402

DTYPES = ("bfloat16", "float16")
over_dtypes = pytest.mark.parametrize("dtype", DTYPES)
over_symmetric = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])


def weights(dtype, rows=64, columns=256):
    x = 0.02 * random_array((rows, columns), "float32", seed=11)
    return x.at[0, :64].set(0).at[1, 3].set(-2).at[2].set(jnp.abs(x[2])).astype(dtype)


def torch_of(x):
    return torch.from_numpy(np.array(jnp.asarray(x).astype(jnp.float32))).to(getattr(torch, x.dtype.name))


def numpy_of(t, dtype):
    return np.asarray(t.float().numpy()).astype(jnp.dtype(dtype))


def arguments(symmetric, group):
    return QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)


def codes_of(q):
    data = np.asarray(q.data)
    return np.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)


@over_dtypes
@over_symmetric
@pytest.mark.parametrize("group", [32, 128])
def test_its_rule(dtype, symmetric, group):
    x, args = weights(dtype), arguments(symmetric, group)
    grouped = torch_of(x).reshape(x.shape[0], -1, group)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    fmt = jlp.Int4(group, symmetric, dtype, rule="compressed-tensors")
    q = jlp.quantize(x, fmt)
    assert_same_bytes(q.scale, numpy_of(scale, dtype))
    if not symmetric:
        np.testing.assert_array_equal(np.asarray(q.zero_point).astype(int) - 8, zero.numpy())
    theirs = fake_quantize(torch_of(x), scale, zero, args)
    np.testing.assert_array_equal(np.asarray(jlp.fake_quantize(x, fmt)), numpy_of(theirs, dtype))


@over_dtypes
@over_symmetric
def test_its_words_and_decoded_weights_are_ours(dtype, symmetric):
    x, group = weights(dtype), 64
    q = jlp.quantize(x, jlp.Int4(group, symmetric, dtype))
    signed = torch.from_numpy(codes_of(q).astype(np.int8) - 8)
    words = np.ascontiguousarray(np.asarray(q.data)).view("<i4")
    np.testing.assert_array_equal(words, pack_to_int32(signed, 4).numpy())
    zero = None if symmetric else torch.from_numpy(np.asarray(q.zero_point).astype(np.int8) - 8)
    theirs = dequantize(signed, torch_of(q.scale), zero, arguments(symmetric, group))
    np.testing.assert_array_equal(np.asarray(q.dequantize()), numpy_of(theirs, dtype))


@over_dtypes
@pytest.mark.parametrize("group", [32, 128])
def test_the_rule_of_slimes_trainer(dtype, group):
    """int4_qat.md 1.1, column A, in torch."""
    x = weights(dtype)
    grouped = torch_of(x).reshape(x.shape[0], -1, group)
    scale = (grouped.abs().amax(-1, keepdim=True).float() / 7).clamp(min=1e-5)
    steps = (grouped.float() / scale).round().clamp(-7, 7)
    fmt = jlp.Int4(group, scale_dtype=dtype, rule="slime")
    theirs = numpy_of((steps * scale).to(grouped.dtype).reshape(x.shape), dtype)
    np.testing.assert_array_equal(np.asarray(jlp.fake_quantize(x, fmt)), theirs)
    q = jlp.quantize(x, fmt)
    np.testing.assert_array_equal(codes_of(q).astype(int) - 8, steps.reshape(x.shape).int().numpy())
    assert_same_bytes(q.scale, numpy_of(scale.to(grouped.dtype)[..., 0], dtype))
