"""Over rotations and keys that are drawn anew, the mean of what eden decodes to is the array (numerics.md 14).

Faults that would break that are planted, one by one, to see that the measurement finds them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlowprec as jlp
from jaxlowprec.arrays.hadamard import Hadamard
from jaxlowprec.ops.hadamard import rotate_padded
from jaxlowprec.ops.quantize import reference
from jaxlowprec.ops.quantize.op import amax_field
from jaxlowprec.ops.quantize.random_bits import Draws

DRAWS, SHAPE, SIZE = 256, (32, 1024), 128
ROTATION = Hadamard(SIZE, (1,) * SIZE)  # its signs are drawn beside it: they would compile a program each
RULES = ("six", "four_over_six_mse", "search")


def student_t():
    return jnp.asarray(np.random.default_rng(0).standard_t(4, SHAPE), jnp.float32)


def by_library(x, fmt, key):
    return jlp.quantize(x, fmt, axis=-1, hadamard=ROTATION, rounding="eden", key=key).dequantize()


def by_reference(x, fmt, key):
    """The same in pure JAX and traced anew, so that what it calls may be replaced."""
    rows, blocks = (jnp.arange(n, dtype=jnp.uint32) for n in (SHAPE[0], SHAPE[1] // 16))
    rotated = rotate_padded(x, ROTATION)
    g = jnp.abs(rotated).max()
    draws = Draws(jax.random.key_data(key), rows, blocks, reference.FIRST_STREAM)
    data, scale = reference.quantize_rows(rotated, fmt, g, draws=draws, eden=True)
    amax = amax_field(fmt, g, eden=True)
    return jlp.QuantizedArray(data, scale, amax, None, fmt, SHAPE, x.dtype, -1, ROTATION).dequantize()


def measured(decoded, rule="six", same_signs=False):
    """<mean, x> / <x, x> of all draws, and what is left of the error of one draw, times their number: 1 each."""
    x, fmt = student_t(), jlp.NVFP4(scale_rule=rule)

    def draw(total, seed):
        signs_key, key = jax.random.split(jax.random.fold_in(jax.random.key(1), seed))
        signs_key = jax.random.key(2) if same_signs else signs_key
        signs = jnp.tile(jax.random.rademacher(signs_key, (SIZE,), jnp.float32), SHAPE[1] // SIZE)
        y = decoded(x * signs, fmt, key) * signs
        return total + y, jnp.sum((y - x) ** 2)

    total, errors = jax.jit(lambda: jax.lax.scan(draw, jnp.zeros_like(x), jnp.arange(DRAWS)))()
    mean = total / DRAWS
    slope = float(jnp.sum(mean * x) / jnp.sum(x * x))
    return slope, float(DRAWS * jnp.sum((mean - x) ** 2) / jnp.mean(errors))


def is_unbiased(slope, left):
    return abs(slope - 1) < 3e-4 and left < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("decoded", [by_library, by_reference])
@pytest.mark.parametrize("rule", RULES)
def test_the_mean_of_many_draws_is_the_array(rule, decoded):
    assert is_unbiased(*measured(decoded, rule))


def clamped(scale, scaled, numbers, bits):
    """Elements beyond the largest code count as the largest code."""
    return CORRECTED(scale, jnp.minimum(scaled, 6.0), numbers, bits)


def uncorrected(scale, scaled, numbers, bits):
    del scaled
    return CORRECTED(scale, numbers, numbers, bits)


def to_nearest_below(scale, scaled, numbers, bits):
    return CORRECTED(scale, scaled, numbers, bits * 0)


CORRECTED = reference.corrected_scales


@pytest.mark.slow
@pytest.mark.parametrize("fault", [clamped, uncorrected, to_nearest_below])
def test_a_fault_of_the_correction_is_found(monkeypatch, fault):
    monkeypatch.setattr(reference, "corrected_scales", fault)
    assert not is_unbiased(*measured(by_reference))


def test_a_ratio_that_may_not_exceed_one_is_found(monkeypatch):
    quotient = reference.quotient
    monkeypatch.setattr(reference, "quotient", lambda a, b: jnp.minimum(quotient(a, b), 1.0))
    assert not is_unbiased(*measured(by_reference))


def test_signs_that_are_not_drawn_anew_are_found():
    """The slope is right, and the error does not average out."""
    slope, left = measured(by_library, same_signs=True)
    assert abs(slope - 1) < 3e-4 and left > 50
