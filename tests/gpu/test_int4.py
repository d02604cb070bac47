"""Int4 on a GPU gives the CPU's bytes: fake quantisation, codes, and codes back."""

import itertools

import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from tests.gpu.sides import assert_same_bytes_on
from tests.helpers import FLOATS, random_array

SHAPES = (((256, 512), 128), ((3, 128, 72), 32), ((64, 64), 64), ((33, 45), 5), ((130, 70), 48), ((40, 100), 300))


def every_way(fmt):
    """Rows and columns, there and back, and at once where the dtype holds it."""

    def run(x):
        results = []
        for axis in (-1, -2):
            q = jlp.quantize(x, fmt, axis=axis, implementation="ffi")
            results += [q, *(jlp.dequantize(q, dtype=out, implementation="ffi") for out in FLOATS)]
            if x.dtype in (jnp.float32, jnp.dtype(fmt.scale_dtype)):
                results.append(jlp.fake_quantize(x, fmt, axis=axis, implementation="ffi"))
        return results

    return run


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("of", FLOATS)
def test_every_group_size_and_type(cpu, gpu, of, dtype, symmetric):
    for (shape, group), bad in itertools.product(SHAPES, (0.0, jnp.nan, jnp.inf)):
        x = (0.02 * random_array(shape, "float32")).at[..., 1, 3].set(bad).astype(of)
        assert_same_bytes_on((cpu, gpu), every_way(jlp.Int4(group, symmetric, dtype, pad=True)), x)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2])
def test_large(cpu, gpu, axis):
    x = 0.02 * random_array((8192, 8192), "bfloat16", seed=1)
    assert_same_bytes_on((cpu, gpu), lambda x: jlp.fake_quantize(x, jlp.Int4(), axis=axis, implementation="ffi"), x)
