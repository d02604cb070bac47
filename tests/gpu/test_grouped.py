"""Rows in groups on a GPU: the CPU's bytes where they are quantised, numbers near the CPU's in products."""

import itertools

import jax
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.grouped_matmul.api import group_amaxes, quantize_groups
from tests.gpu.sides import assert_same_bytes_on, run_on
from tests.helpers import FLOATS, format_name, random_array
from tests.low_precision import recipes

KEY = np.array([3, 5], np.uint32)
FORMATS = (
    jlp.NVFP4(),
    jlp.MXFP8(),
    jlp.MXFP4(),
    jlp.Float8Block(),
    jlp.Float8Block("e5m2", power_of_two=False),
    jlp.Float8Tensor(),
    jlp.Int8Rows(),
    jlp.Float8Rows("e5m2"),
)
CASES = (  # sizes of groups, rows, columns
    ([5, 0, 37, 1, 16], 59, 48),
    ([130, 0, 257, 3, 128, 1], 600, 144),
    ([30, 100, -4, 400], 140, 130),
    ([0, 0, 0], 20, 32),
)
LARGE = ([1000, 0, 4096, 17, 2048, 3, 128, 900], 8192, 4096)
RECIPES = recipes("nvfp4", "mxfp8", "fp8_block", "fp8_current", "int4_qat")


def both_ways(x, sizes, fmt, words):
    """Rowwise and columnwise, each alone and in one pass."""
    rotation = Hadamard() if isinstance(fmt, jlp.NVFP4) else None
    options = {"hadamard": rotation, "words": words, "implementation": "ffi"}
    return [
        quantize_groups(x, sizes, fmt, rowwise=rowwise, columnwise=columnwise, **options)
        for rowwise, columnwise in ((True, False), (False, True), (True, True))
    ]


@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_format_rounding_and_direction(cpu, gpu, fmt, dtype):
    for (sizes, rows, columns), stochastic in itertools.product(CASES, (False, True)):
        words = np.random.default_rng(rows).integers(0, 2**32, (len(sizes), 2), dtype=np.uint32)
        x, sizes = random_array((rows, columns), dtype, seed=rows), np.array(sizes, np.int32)

        def run(x, sizes, words, stochastic=stochastic):
            return both_ways(x, sizes, fmt, words if stochastic else None)

        assert_same_bytes_on((cpu, gpu), run, x, sizes, words)


@pytest.mark.parametrize("fmt", [jlp.Float8Tensor(), jlp.Float8Tensor("e5m2")], ids=format_name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_by_given_scales(cpu, gpu, fmt, dtype):
    for sizes, rows, columns in CASES:
        scales = np.linspace(0, 100, len(sizes), dtype=np.float32)

        def run(x, sizes, scales):
            options = {"rowwise": True, "columnwise": True, "implementation": "ffi"}
            return quantize_groups(x, sizes, fmt, encode_scale=scales, **options)

        x = random_array((rows, columns), dtype, seed=rows)
        assert_same_bytes_on((cpu, gpu), run, x, np.array(sizes, np.int32), scales)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_amaxes(cpu, gpu, dtype, bad):
    for sizes, rows, columns in CASES:
        x = random_array((rows, columns), dtype, seed=rows)
        x = x if bad is None else x.at[rows // 2, 1].set(bad)
        assert_same_bytes_on(
            (cpu, gpu),
            lambda x, s: group_amaxes(x, s, True, Hadamard(), "ffi"),
            x,
            np.array(sizes, np.int32),
        )


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
def test_large(cpu, gpu, fmt):
    sizes, rows, columns = LARGE
    words = np.random.default_rng(rows).integers(0, 2**32, (len(sizes), 2), dtype=np.uint32)
    x = random_array((rows, columns), "bfloat16", seed=1)
    run = lambda x, sizes, words: both_ways(x, sizes, fmt, words)[-1]  # noqa: E731
    assert_same_bytes_on((cpu, gpu), run, x, np.array(sizes, np.int32), words)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_layer_and_its_gradients_are_near_the_cpus(cpu, gpu, recipe):
    for sizes, rows, _ in CASES[:3]:
        x, w = random_array((rows, 128), "bfloat16", 0), random_array((len(sizes), 128, 96), "float32", 1)
        dy, sizes = random_array((rows, 96), "bfloat16", 2), np.array(sizes, np.int32)

        def step(x, w, dy, sizes):
            y, pullback = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=recipe, key=KEY), x, w)
            return y, *pullback(dy)

        sides = [run_on(device, step, x, w, dy, sizes) for device in (cpu, gpu)]
        for theirs, ours in zip(*sides, strict=True):
            ours, theirs = (np.asarray(g).astype(np.float64) for g in (ours, theirs))
            assert np.linalg.norm(ours - theirs) <= 0.005 * np.linalg.norm(theirs)  # bfloat16's last bit
        assert not sides[1][0][min(rows, int(sizes.clip(0).sum())) :].any()


@pytest.mark.parametrize("recipe", [jlp.Int8RowScaling(), jlp.Float8RowScaling()], ids=lambda r: type(r).__name__)
def test_eight_bits_by_rows_are_the_cpus(cpu, gpu, recipe):
    """Bytes where rows are quantised, and in products of integers, which are exact."""
    sizes, rows, _ = CASES[1]
    x, w = random_array((rows, 128), "bfloat16", 0), random_array((len(sizes), 128, 96), "float32", 1)
    dy, sizes = random_array((rows, 96), "bfloat16", 2), np.array(sizes, np.int32)
    words = np.random.default_rng(rows).integers(0, 2**32, (len(sizes), 2), dtype=np.uint32)
    fmt = recipe.roles().operands("wgrad")[0].format

    def quantised(x, sizes, words):
        return quantize_groups(x, sizes, fmt, rowwise=True, columnwise=True, words=words)

    def step(x, w, dy, sizes):
        y, pullback = jax.vjp(lambda x, w: jlp.grouped_matmul(x, w, sizes, recipe=recipe, key=KEY), x, w)
        return y, *pullback(dy)

    assert_same_bytes_on((cpu, gpu), quantised, x, sizes, words)
    if fmt.element == "int8":
        assert_same_bytes_on((cpu, gpu), step, x, w, dy, sizes)


@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
def test_every_kernel_once(cpu, gpu, fmt):
    sizes, rows, columns = CASES[0]
    words = np.random.default_rng(rows).integers(0, 2**32, (len(sizes), 2), dtype=np.uint32)
    x = random_array((rows, columns), "bfloat16")
    run = lambda x, sizes, words: both_ways(x, sizes, fmt, words)  # noqa: E731
    assert_same_bytes_on((cpu, gpu), run, x, np.array(sizes, np.int32), words)
