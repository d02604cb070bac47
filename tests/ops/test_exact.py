"""Quotients, roots and bytes by integers: against NumPy, whatever the platform's estimates are worth."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.ops import exact
from jaxlowprec.ops.rounding import narrowed, widened
from tests.helpers import FLOATS, assert_same_bytes, assert_same_numbers
from tests.numpy_oracle.float32 import flush

F = np.float32
SPECIAL = np.array(
    [0, 1e-45, 2.0**-127, 2.0**-126, 1, np.nextafter(F(1), F(2)), 3, 448, 2.0**126, np.finfo(F).max, np.inf, np.nan], F
)
RECIPROCAL_ERRORS = [0.0, 2.0**-18, -(2.0**-18)]  # TPUs' reciprocal without a Newton step
ROOT_ERRORS = [0.0, 2.0**-20, -(2.0**-20)]


@pytest.fixture
def with_error(monkeypatch):
    """Makes an estimate worse by a relative error, and compiles a function that uses it."""

    def compiled(function, name, error):
        estimate = getattr(exact, name)
        monkeypatch.setattr(exact, name, lambda x: estimate(x) * F(1 + error))
        return jax.jit(lambda *args: function(*args))  # a function of its own, which JAX has not traced before

    return compiled


def quotient(a, b):
    """a / b as NumPy divides, subnormals counting as zeros."""
    with np.errstate(all="ignore"):
        return flush(flush(a) / flush(b))


def any_floats(count, seed):
    """float32 numbers of any bits."""
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32).view(F)


def near_one(count, seed):
    """float32 numbers of any significand, whose quotient are neither too large nor too small."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 2**23, count, np.uint32) | rng.integers(100, 150, count, np.uint32) << 23).view(F)


class TestDivided:
    @pytest.mark.parametrize("error", RECIPROCAL_ERRORS)
    @pytest.mark.parametrize("numbers", [any_floats, near_one])
    def test_any_pair(self, numbers, error, with_error):
        divided = with_error(exact.quotient_by_integers, "reciprocal_estimate", error)
        a, b = numbers(1 << 21, 1), numbers(1 << 21, 2)
        assert_same_numbers(divided(a, b), quotient(a, b))

    @pytest.mark.parametrize("error", RECIPROCAL_ERRORS)
    def test_next_to_the_middle_of_two_quotients(self, error, with_error):
        """a = the product of b and a middle, rounded: what a wrong estimate rounds wrongly first."""
        divided = with_error(exact.quotient_by_integers, "reciprocal_estimate", error)
        b, q = near_one(1 << 20, 3).astype(np.float64), near_one(1 << 20, 4)
        middle = q.astype(np.float64) * (1 + 2.0**-24)
        a, b = (b * middle).astype(F), b.astype(F)
        assert_same_numbers(divided(a, b), quotient(a, b))

    def test_special_numbers(self):
        numbers = np.concatenate([SPECIAL, -SPECIAL])
        a, b = numbers[:, None], numbers[None, :]
        assert_same_numbers(exact.quotient_by_integers(a, b), quotient(a, b))

    @pytest.mark.slow
    @pytest.mark.parametrize("error", RECIPROCAL_ERRORS)
    @pytest.mark.parametrize("a", [1.0, 6.0, 448.0, 1536.0, 2688.0, 57344.0])
    def test_constants_by_every_significand(self, a, error, with_error):
        divided = with_error(exact.quotient_by_integers, "reciprocal_estimate", error)
        every = (np.arange(2**23, dtype=np.uint32) | np.uint32(127 << 23)).view(F)
        assert_same_numbers(divided(F(a), every), quotient(F(a), every))
        assert_same_numbers(divided(every, F(a)), quotient(every, F(a)))

    def test_a_number_for_all_of_a_batch(self):
        """XLA would multiply by its reciprocal."""
        a = np.random.default_rng(3).standard_normal((7, 300)).astype(np.float32)
        each = jax.jit(jax.vmap(lambda a: exact.quotient(a, 127.0)))
        np.testing.assert_array_equal(np.asarray(each(a)), a / np.float32(127))

    def test_cpus_divide_the_same(self):
        a, b = any_floats(1 << 18, 5), any_floats(1 << 18, 6)
        assert_same_numbers(jax.jit(exact.quotient)(a, b), quotient(a, b))
        assert_same_numbers(jax.jit(exact.quotient)(a, F(1536)), quotient(a, F(1536)))


class TestRoot:
    @pytest.mark.parametrize("error", ROOT_ERRORS)
    def test_any_number(self, error, with_error):
        root = with_error(exact.root_by_integers, "inverse_root_estimate", error)
        x = np.abs(np.concatenate([any_floats(1 << 21, 7), near_one(1 << 21, 8)]))
        assert_same_numbers(root(x), np.sqrt(flush(x)))

    def test_special_numbers(self):
        with np.errstate(all="ignore"):
            numbers = np.concatenate([SPECIAL, -SPECIAL])
            assert_same_numbers(exact.root_by_integers(numbers), np.sqrt(flush(numbers)))

    @pytest.mark.slow
    @pytest.mark.parametrize("error", ROOT_ERRORS)
    @pytest.mark.parametrize("exponent", [127, 128])
    def test_every_significand(self, exponent, error, with_error):
        root = with_error(exact.root_by_integers, "inverse_root_estimate", error)
        every = (np.arange(2**23, dtype=np.uint32) | np.uint32(exponent << 23)).view(F)
        assert_same_numbers(root(every), np.sqrt(every))


class TestBytes:
    def test_e4m3_bytes_are_the_nearest(self):
        """Every number of 12 significant bits within and around the range, and the neighbours of all middles."""
        numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F)
        middles = (numbers[1:] + numbers[:-1]) / 2
        grid = (np.arange(90 << 11, 140 << 11, dtype=np.uint32) << 12).view(F)
        x = np.concatenate([grid, *(np.nextafter(middles, F(to)) for to in (0, np.inf)), middles, numbers])
        x = np.append(flush(x), [F(0), np.finfo(F).max, F(np.inf)])
        wanted = np.minimum(x, F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(exact.e4m3_byte(x), wanted)

    def test_e4m3_values(self):
        byte = np.arange(0x7F, dtype=np.uint8)
        assert_same_bytes(exact.e4m3_value(jnp.asarray(byte)), byte.view(ml_dtypes.float8_e4m3fn).astype(F))

    def test_e2m1_values(self):
        code = np.arange(16, dtype=np.uint8)
        assert_same_bytes(exact.e2m1_value(jnp.asarray(code)), code.view(ml_dtypes.float4_e2m1fn).astype(F))


class TestWidened:
    @pytest.mark.parametrize("dtype", FLOATS[:2])
    def test_every_pattern(self, dtype):
        x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(jnp.dtype(dtype))
        found, wanted = np.asarray(widened(jnp.asarray(x))), x.astype(F)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        known = ~np.isnan(wanted)
        assert_same_bytes(found[known], wanted[known])

    @pytest.mark.parametrize("dtype", FLOATS[:2])
    def test_a_program_keeps_the_rounding(self, dtype):
        x = near_one(1 << 12, 9)
        found = jax.jit(lambda x: widened((x * 3).astype(dtype)))(x)
        assert_same_bytes(found, narrowed(jnp.asarray(x * F(3)), jnp.dtype(dtype)))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_its_derivative_is_that_of_the_cast(self, dtype):
        x = jnp.ones(3, dtype)
        assert_same_bytes(jax.grad(lambda x: (widened(x) * 3).sum())(x), jnp.full(3, 3, dtype))
