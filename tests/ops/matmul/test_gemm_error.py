"""The error bounds of GEMMs on GPUs (xla_ffi/cuda/matmul/gemm_error.h), against a model of the tensor cores."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops.scaled_matmul import cuda
from tests.helpers import random_array
from tests.numpy_oracle.tensor_core import fp8_product

FP8 = jlp.Float8Tensor()
ROWS = 24


def bounds(depth, capability=90, float32_sums=False, formats=(FP8, FP8)):
    """For random operands, and for any."""
    return cuda.sum_errors(*formats, 64, 64, depth, float32_sums, capability)


def errors(a, b, **options):
    """Relative to the sum of the terms' magnitudes."""
    size = np.abs(a) @ np.abs(b).T
    return np.abs(fp8_product(a, b, **options) - a @ b.T) / np.where(size == 0, 1, size)


def codes(x):
    """The numbers of a tensor quantised to FP8, without its scale."""
    q = jlp.quantize(jnp.asarray(x, jnp.float32), FP8)
    return np.asarray(q.data).astype(np.float64)


def operands(kind, depth):
    a, b = (random_array((ROWS, depth), "float32", seed) for seed in (1, 2))
    if kind == "normal":
        a, b = (np.random.default_rng(seed).standard_normal((ROWS, depth)) for seed in (1, 2))
    if kind == "of one sign":
        a, b = (np.abs(np.random.default_rng(seed).standard_normal((ROWS, depth))) for seed in (1, 2))
    return codes(a), codes(b)


@pytest.mark.parametrize("instruction", [16, 32])
@pytest.mark.parametrize("kind", ["as in the tests", "normal", "of one sign"])
@pytest.mark.parametrize("depth", [32, 128, 256, 1024])
def test_fp8_sums_of_random_operands(kind, depth, instruction):
    found = errors(*operands(kind, depth), instruction=instruction)
    assert found.max() <= bounds(depth)[0]
    if depth <= 128 and kind != "normal":
        contract = bounds(depth, float32_sums=True)[0]
        assert np.mean(found > contract) > 0.25  # numerics.md 9 does not hold


@pytest.mark.parametrize("instruction", [16, 32])
def test_the_largest_error_of_fp8_sums(instruction):
    """One product, then 127 that lie just below the last bit that is kept beside it."""
    a, b = np.full((1, 128), 7.5), np.full((1, 128), 1.0)
    a[0, 0] = b[0, 0] = 256  # 2^16, kept down to 2^3
    largest = bounds(128)[1]
    assert 0.8 * largest < errors(a, b, instruction=instruction).max() < largest


def test_fast_accumulation_does_not_keep_to_the_bound():
    a, b = operands("of one sign", 2048)
    assert errors(a, b).max() <= bounds(2048)[0]
    assert errors(a, b, promotion=None).min() > bounds(2048)[1]


def test_other_routes_have_float32_sums():
    contract = 256 * 2.0**-24
    block, other = jlp.Float8Block(), jlp.Float8Block(power_of_two=False)
    for capability in (80, 100):
        for fmt in (FP8, block, jlp.MXFP8(), jlp.NVFP4()):
            assert bounds(256, capability, False, (fmt, fmt)) == (contract, contract)
    for capability in (89, 90):
        for fmt in (FP8, block, jlp.MXFP8(), jlp.NVFP4()):
            assert bounds(256, capability, True, (fmt, fmt)) == (contract, contract)
    for fmt in (block, other, jlp.MXFP4()):
        assert bounds(256, 90, False, (fmt, fmt)) == bounds(256) > (contract, contract)
    assert bounds(256, 90, False, (jlp.MXFP4(), jlp.MXFP8())) == (contract, contract)
    assert bounds(256, 90, True, (jlp.MXFP4(), jlp.MXFP4())) == (contract, contract)
    for fmt in (block, other):  # also where padding makes K whole blocks
        assert bounds(256, 90, False, (fmt, jlp.MXFP4())) == bounds(250, 90, False, (fmt, jlp.MXFP4())) == bounds(256)
    for capability, float32_sums in ((80, False), (100, False), (90, True)):
        assert bounds(256, capability, float32_sums, (block, jlp.MXFP4())) == (contract, contract)
