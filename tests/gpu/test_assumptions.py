"""What the GEMMs assume of cuBLASLt and of CUDA, and no manual states (docs/explanation/gpu.md, "Assumptions")."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from tests.gpu.sides import ON_A_GPU, environment, run_on
from tests.helpers import format_name, random_array, run_python
from tests.ops.matmul.test_scaled_matmul_formats import ONE_OF_EACH_KIND
from tests.products import assert_is_product, decoded, sum_error

KINDS = [(jlp.NVFP4(), jlp.NVFP4((16, 16))), *ONE_OF_EACH_KIND]
BLOCKS = [
    (jlp.Float8Block(power_of_two=power), jlp.Float8Block("e4m3", block, power))
    for block in ((1, 128), (128, 128))
    for power in (True, False)
]


def pair_name(pair):
    return " x ".join(map(format_name, pair))


def quantized(formats, m, k, n):
    return tuple(jlp.quantize(random_array((r, k), "float32", r), f) for r, f in zip((m, n), formats, strict=True))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("formats", KINDS, ids=pair_name)
def test_what_the_result_held_before_does_not_matter(gpu, formats, precision, dtype):
    """A beta of 0 in the device's memory, and a result full of NaN: the buffer of an argument that is given away."""
    sizes = m, k, n = 64, 256, 96
    a, b = quantized(formats, *sizes)

    @functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
    def multiply(a, b, result):
        del result
        return jlp.scaled_matmul(a, b, preferred_element_type=dtype, precision=precision)

    with jax.default_device(gpu):
        for _ in range(3):
            held = jax.block_until_ready(jax.device_put(jnp.full((m, n), jnp.nan, dtype), gpu))
            where = held.unsafe_buffer_pointer()
            y = multiply(*jax.device_put((a, b), gpu), held)
            assert y.unsafe_buffer_pointer() == where
            assert_is_product(np.asarray(y), decoded(a), decoded(b).T, sum_error(formats, sizes, precision is not None))


@pytest.mark.parametrize("formats", BLOCKS, ids=pair_name)
@pytest.mark.parametrize("depth", [32, 64, 96, 128])
@pytest.mark.parametrize("rows", [4, 20])
def test_small_products_of_fp8_blocks(gpu, formats, rows, depth):
    """K below 128, and rows of a, cuBLASLt's N, that are padded to 16 or a multiple of 4 alone: it multiplies them, or
    both operands are decoded."""
    sizes = (rows, depth, 32)
    a, b = quantized(formats, *sizes)
    result = run_on(gpu, lambda a, b: jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32), a, b)
    assert_is_product(result, decoded(a), decoded(b).T, sum_error(formats, sizes))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("precision", [None, "highest"])
def test_products_around_the_smallest_normal_number(gpu, precision, dtype):
    """Those of 2^-126 and more are right. Those below are right to the unit of subnormal numbers, or 0.

    numerics.md counts subnormal numbers as zero; cuBLASLt may keep them, or flush them before or after it rounds.
    """
    fmt, scale = jlp.Float8Tensor(), jnp.float32(2.0**-66)
    a, b = np.zeros((11, 32)), np.zeros((16, 32))
    a[:, 0] = np.exp2(np.arange(11.0) - 2)  # by 1: 2^-134 to 2^-124
    a[:, 1] = -(2.0**-9)
    b[:, 0] = 1
    b[1::3, 1] = 2.0**-9  # 2^-150 less
    b[2::3, 1] = 1  # 2^-141 less
    codes = [jnp.asarray(x, jnp.float8_e4m3fn) for x in (a, b)]
    operands = [jlp.QuantizedArray(c, scale, None, None, fmt, c.shape, jnp.dtype("float32"), -1, None) for c in codes]
    y = run_on(gpu, lambda a, b: jlp.scaled_matmul(a, b, preferred_element_type=dtype, precision=precision), *operands)
    y, smallest = np.asarray(y).astype(np.float64), 2.0**-126
    exact, terms = (f(a) @ f(b).T * 2.0**-132 for f in (np.asarray, np.abs))
    assert (exact == smallest).any() and (exact == smallest - 2.0**-150).any()
    error = (sum_error((fmt, fmt), (11, 32, 16), precision is not None) + 2.0**-24) * terms
    near = np.abs(y - exact) <= error + float(jnp.finfo(dtype).eps) * np.maximum(exact, smallest)
    assert np.all(near | ((exact - error < smallest) & (y == 0)))


def multiply_for_the_first_time():
    """Each kernel that GEMMs need is loaded, and cuBLASLt first asked, while the program is recorded."""
    device = jax.devices("cuda" if ON_A_GPU else "cpu")[0]
    with jax.default_device(device):
        for rows in (8, 64):
            for formats in KINDS:
                sizes = (rows, 256, 96)
                a, b = jax.device_put(quantized(formats, *sizes), device)
                multiply = jax.jit(lambda a, b: jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32))
                for _ in range(3):  # recorded by the first, replayed by the others
                    assert_is_product(np.asarray(multiply(a, b)), decoded(a), decoded(b).T, sum_error(formats, sizes))
            x = random_array((rows, 256), "bfloat16", 1)
            w = jlp.quantize(random_array((96, 256), "bfloat16", 2), jlp.NVFP4())
            served, placed = jax.jit(jlp.scaled_matmul), jax.device_put((x, w), device)
            for _ in range(3):
                assert_is_product(np.asarray(served(*placed)), np.asarray(x, np.float64), decoded(w).T)
    print("all are products")


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_a_first_execution_that_is_recorded(loading):
    """Where LAZY, CUDA's default, fails and EAGER does not, kernels cannot be loaded during a recording."""
    assert_first_products(CUDA_MODULE_LOADING=loading)


def test_algorithms_are_timed_before_a_recording():
    """A GEMM that is launched, or recorded, without that fails and says so."""
    assert_first_products(JAXLOWPREC_GEMM_ALGORITHM="timed")


def assert_first_products(**variables):
    """In a process of its own that records every program."""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    code = "from tests.gpu.test_assumptions import multiply_for_the_first_time as run; run()"
    done = run_python("-c", code, **environment(XLA_FLAGS=flags, **variables))
    assert done.stdout.strip().endswith("all are products")
