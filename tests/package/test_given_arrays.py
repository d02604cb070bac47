"""NumPy arrays and numbers that a caller gives become JAX arrays without a program, and without sharing memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxlowprec as jlp
from jaxlowprec.arguments import array, as_array
from jaxlowprec.checkpoints.schemes.nvfp4 import ModelOptNVFP4
from tests.helpers import assert_same_bytes, compilations, random_array
from tests.sharding.meshes import mesh_of

KEY = np.array([1, 2], np.uint32)


def with_given(x, fmt):
    return jlp.quantize(x, fmt, rounding="stochastic", key=KEY, amax=3.0)


OPS = {
    "quantize": lambda x: jlp.quantize(x, jlp.NVFP4()),
    "quantize-given": lambda x: with_given(x, jlp.NVFP4()),
    "quantize-int4": lambda x: jlp.quantize(x, jlp.Int4(32)),
    "quantize_both": lambda x: jlp.quantize_both(x, jlp.MXFP8()),
    "hadamard_transform": jlp.hadamard_transform,
    "fake_quantize": lambda x: jlp.fake_quantize(x, jlp.MXFP4()),
    "linear": lambda x: jlp.linear(x, x.T.astype(np.float32), recipe=jlp.NVFP4BlockScaling()),
}


@pytest.mark.parametrize("op", OPS)
def test_an_op_compiles_no_more_for_a_numpy_array(op):
    columns = 160 + 32 * list(OPS).index(op)  # of a shape that no other op made a program for
    given = np.asarray(random_array((32, columns)))
    expected = OPS[op](jax.device_put(given))
    with compilations() as found:
        made = OPS[op](given)
    assert found == []
    assert_same_bytes(made, expected)


def test_loading_a_checkpoint_compiles_nothing():
    scheme = ModelOptNVFP4()
    stored = scheme.compress(np.asarray(random_array((48, 96))))
    with compilations() as found:
        scheme.load(stored)
    assert found == []


@pytest.mark.parametrize("offset", [0, 4], ids=["aligned", "unaligned"])
def test_a_numpy_array_is_copied(offset):
    memory = np.zeros(2**16, np.uint8)
    begin = -memory.ctypes.data % 64 + offset  # JAX shares memory that begins at a multiple of 64
    given = memory[begin : begin + 2**15].view(np.float32)
    x = as_array(given)
    given[:] = 1
    assert not np.any(x)


@pytest.mark.parametrize(
    "given",
    [np.arange(3.0), np.arange(3), np.float32(2), np.array(True), 2.5, 3, True, [1.0, 2.0], jnp.arange(3)],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_an_array_is_what_jax_makes_of_it(given):
    made, expected = as_array(given), jnp.asarray(given)
    assert_same_bytes(made, expected)
    assert (made.weak_type, made.committed) == (expected.weak_type, expected.committed)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_an_array_is_on_all_devices_of_the_mesh_that_is_set(axis_type):
    with jax.set_mesh(mesh_of((2, 4), axis_type)):
        made, expected = as_array(np.ones(8)), jnp.asarray(np.ones(8))
    assert made.sharding == expected.sharding and made.sharding.num_devices == 8


def test_an_array_is_a_constant_of_a_traced_function():
    traced = jax.make_jaxpr(lambda y: as_array(np.ones(8, np.float32)) * y)(2.0)
    assert [equation.primitive.name for equation in traced.eqns] == ["convert_element_type", "mul"]


@pytest.mark.parametrize("given", [np.array(["a"]), np.array([None]), np.ma.masked_array([1.0])], ids=str)
def test_what_is_no_array_is_named(given):
    with pytest.raises(TypeError, match=r"^f: x=.*; needs an array$"):
        array("f", "x", given)
