"""The Pallas kernel for TPUs that quantises to Int4, interpreted on a CPU: the reference's bytes."""

import jax
import jax.numpy as jnp
import pytest

import jaxlowprec as jlp
from jaxlowprec.ops import tiles
from jaxlowprec.ops.int4 import tpu
from jaxlowprec.ops.int4.op import quantize_op
from tests.helpers import assert_same_bytes
from tests.ops.quantize.test_tpu import SHAPES, numbers, roundings_of, small_programs

__all__ = ["small_programs"]  # a fixture

FORMATS = [jlp.Int4(group, symmetric, pad=True) for group in (16, 32, 128) for symmetric in (True, False)]
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
by_direction = pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "columns"])


def assert_bytes_of_the_reference(fmt, columnwise, x):
    assert tpu.serves(fmt, x)
    expected = quantize_op(fmt, columnwise, True, "reference")(x)
    found = jax.jit(lambda x: tpu.quantize(fmt, columnwise, x, interpret=True))(x)
    for value, wanted in zip(found, expected, strict=True):
        assert_same_bytes(value, wanted)


@pytest.mark.sampled(3)
@by_direction
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@by_format
def test_bfloat16(fmt, shape, columnwise):
    assert_bytes_of_the_reference(fmt, columnwise, numbers(shape, jnp.bfloat16))


@by_format
def test_any_float32(fmt):
    """Of every binade, zeros of both signs, subnormal numbers; blocks with a NaN and with an infinity."""
    assert_bytes_of_the_reference(fmt, False, numbers((64, 160), jnp.float32, special=True))


@by_format
def test_ties_between_steps(fmt):
    """Multiples of half a step of blocks, among them those whose largest number fixes the scale."""
    halves = jax.random.randint(jax.random.key(0), (64, 256), -30, 31).astype(jnp.float32) / 2
    assert_bytes_of_the_reference(fmt, False, halves * jnp.exp2(jnp.arange(64.0) - 32)[:, None])


@pytest.mark.parametrize(
    "fmt",
    [
        jlp.Int4(24),
        jlp.Int4(256),
        jlp.Int4(8),
        jlp.Int4(scale_dtype="float16"),
        jlp.Int4(rule="slime"),
    ],
    ids=str,
)
def test_other_variants_take_the_reference(fmt):
    assert not tpu.serves(fmt, jax.ShapeDtypeStruct((256, 768), jnp.bfloat16))


@by_format
def test_no_rounding_is_left_to_the_platform(fmt):
    program = jax.make_jaxpr(lambda x: tpu.quantize(fmt, False, x))(jnp.zeros((tiles.UNIT, tiles.UNIT)))
    (kernel,) = (e.params["jaxpr"] for e in program.eqns if e.primitive.name == "pallas_call")
    assert list(roundings_of(kernel)) == []
