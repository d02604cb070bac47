"""The Pallas kernels for TPUs, interpreted on a CPU: the reference's bytes, and no rounding left to the platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops import tiles
from jaxlowprec.ops.amax import Amaxes, amax_of_bits
from jaxlowprec.ops.quantize import tpu
from jaxlowprec.ops.quantize.op import random_operands, reference_call, spec_of, tpu_call
from tests.helpers import CHOSEN_SCALES, ONE_OF_EACH, assert_same_bytes, format_name

FORMATS = [fmt for fmt in ONE_OF_EACH if not fmt.row_scaled and fmt.scaling != "rows"]
BOTH, ROWS, COLUMNS = (True, True), (True, False), (False, True)
SHAPES = {"ragged": (100, 200), "batch": (2, 48, 130), "several tiles": (384, 640)}
ESTIMATES = ("reciprocal_estimate",)  # functions whose results are corrected
ROUNDED_BY_THE_PLATFORM = {"div", "sqrt", "rsqrt", "exp", "log", "pow", "tanh", "logistic", "rem"}


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Tiles of one chunk's instructions, and several tiles in small arrays: XLA compiles them sooner."""
    monkeypatch.setattr(tiles, "UNROLLED", 1)
    monkeypatch.setattr(tiles, "TILE", 256)


def numbers(shape, dtype, special=False):
    rng = np.random.default_rng(sum(shape))
    exponents = rng.integers(-140, 120, shape) if special else rng.integers(-6, 3, shape)
    x = rng.standard_normal(shape) * 2.0**exponents
    if special:
        x[..., 0, 5], x[..., 3, 7], x[..., 5, 5], x[..., 20, :] = np.nan, -np.inf, -0.0, 0
    return jnp.asarray(x, dtype)


def operands_of(spec, x, tensor):
    """Those of the op beside x: a number for each tensor, then words and indices, as of a part of a larger array."""
    found = [jnp.full(x.shape[:-2], tensor, jnp.float32)] * spec.tensors
    words = jnp.broadcast_to(jnp.asarray([12345, 678910], jnp.uint32), (*x.shape[:-2], 2)) if spec.stochastic else None
    return found + random_operands(spec, x, words, (jnp.uint32(32), jnp.uint32(64)))


def assert_bytes_of_the_reference(spec, x, tensor=3.7):
    assert tpu.serves(spec, x)
    operands = operands_of(spec, x, tensor)
    expected = jax.jit(lambda *args: reference_call(spec, *args))(x, *operands)
    found = jax.jit(lambda *args: tpu.quantize(spec, *args, interpret=True))(x, *operands)
    for value, wanted in zip(found, expected, strict=True):
        assert_same_bytes(value, wanted)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
def test_both_ways(fmt, shape, stochastic):
    x = numbers(shape, jnp.bfloat16)
    assert_bytes_of_the_reference(spec_of(x, fmt, BOTH, None, stochastic), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
def test_any_float32(fmt):
    """Of every binade, zeros of both signs, subnormal numbers; blocks with a NaN and with an infinity."""
    x = numbers((64, 160), jnp.float32, special=True)
    assert_bytes_of_the_reference(spec_of(x, fmt, BOTH, None, False), x, tensor=3e38)


@pytest.mark.parametrize("tensor", [117.0, np.nan])
def test_a_given_factor(tensor):
    x = numbers((64, 160), jnp.float32, special=True)
    spec = spec_of(x, jlp.Float8Tensor(), ROWS, None, False, encode_scale_given=True)
    assert_bytes_of_the_reference(spec, x, tensor)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_rotated_columns_with_random_bits(dtype):
    x = numbers((256, 384), dtype)
    assert_bytes_of_the_reference(spec_of(x, jlp.NVFP4(), COLUMNS, Hadamard(), True), x)


@pytest.mark.parametrize("shape", [(100, 200), (2, 384, 272)], ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_amaxes(shape, special):
    """What tiles read beyond the array's end is left out."""
    x, rotation = numbers(shape, jnp.bfloat16, special), Hadamard()
    plain, turned = Amaxes(hadamard=rotation).reference(x)
    found = tiles.largest_bits(x, [None, rotation], interpret=True)
    for bits, wanted in zip(found, (plain, turned), strict=True):
        assert_same_bytes(amax_of_bits(bits), wanted)


@pytest.mark.parametrize("slices", [4096, 4097])
def test_no_more_slices_than_scalar_memory_holds(slices):
    x = jax.ShapeDtypeStruct((slices, 32, 32), jnp.bfloat16)
    assert tpu.serves(spec_of(x, jlp.NVFP4(), BOTH, None, False), x) == (slices == 4096)


@pytest.mark.parametrize("fmt", CHOSEN_SCALES, ids=format_name)
def test_other_variants_take_the_reference(fmt):
    x = numbers((32, 64), jnp.bfloat16)
    spec = spec_of(x, fmt, ROWS, None, False)
    assert not tpu.serves(spec, x)
    operands = operands_of(spec, x, 3.7)
    for value, wanted in zip(tpu_call(spec, x, *operands), reference_call(spec, x, *operands), strict=True):
        assert_same_bytes(value, wanted)


def roundings_of(jaxpr, within=""):
    """Operations whose last bit is the platform's choice, and casts to narrower floats, in a program and its parts."""
    by_platform = set()
    for equation in jaxpr.eqns:
        name, values = equation.primitive.name, list(equation.params.values())
        if name == "platform_index":
            by_platform.update(equation.outvars)
        if name == "cond" and equation.invars[0] in by_platform:
            values = equation.params["branches"][-1:]  # the others are for CPUs
        inner = equation.params["name"] if name == "jit" else within
        for part in filter(is_program, jax.tree.leaves(values, is_leaf=is_program)):
            yield from roundings_of(getattr(part, "jaxpr", part), inner)
        for result in (variable.aval for variable in equation.outvars):
            is_float = jnp.issubdtype(getattr(result, "dtype", None), jnp.floating)
            narrowed = is_float and name == "convert_element_type" and result.dtype.itemsize < 4
            if narrowed or (is_float and name in ROUNDED_BY_THE_PLATFORM and inner not in ESTIMATES):
                yield f"{inner}: {name} {result}"


def is_program(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize("fmt", FORMATS, ids=format_name)
def test_no_rounding_is_left_to_the_platform(fmt):
    x = numbers((256, 256), jnp.bfloat16)
    rotation = Hadamard() if fmt.scaling == "two_level" and not fmt.tiles else None
    spec = spec_of(x, fmt, BOTH, rotation, True)
    program = jax.make_jaxpr(lambda *args: tpu.quantize(spec, *args))(x, *operands_of(spec, x, 3.7))
    (kernel,) = (e.params["jaxpr"] for e in program.eqns if e.primitive.name == "pallas_call")
    assert list(roundings_of(kernel)) == []


def test_roundings_are_found():
    program = jax.make_jaxpr(lambda x: jax.lax.cond(x[0] > 0, lambda: 448 / x, lambda: x))(jnp.ones(4))
    assert [found.split()[1] for found in roundings_of(program.jaxpr)] == ["div"]
    program = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))(jnp.ones(4))
    assert [found.split()[1] for found in roundings_of(program.jaxpr)] == ["convert_element_type"]
