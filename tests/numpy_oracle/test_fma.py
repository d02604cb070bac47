"""The oracle's fused multiply-add against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest

from tests.numpy_oracle import F, fma


def rounded(number):
    """The float32 nearest to a fraction, ties to even: in integers of a normal number's last place."""
    exponent, magnitude = -200, abs(number)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return F(np.copysign(float(round(magnitude / unit) * unit), float(number)))


def exact(a, b, c):
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("side", [-1, 1])
def test_sums_next_to_a_tie_that_float64_takes_for_the_tie(sign, last, side):
    """(1 + h)(1 - h) = 1 - h^2: the sum is off the tie by 2^-24 of 2^30, beyond float64's 53 bits."""
    a, b = F(1 + 2.0**-15), F(sign * 2.0**6 * (1 - 2.0**-15))
    c = F(sign * (2.0**30 + last * 2.0**7))
    if side == 1:
        b, c = -b, F(sign * (2.0**30 + (last + 1) * 2.0**7))
    assert fma(a, b, c) == exact(a, b, c)


@pytest.mark.slow
def test_random_numbers_of_every_distance_and_cancellation():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(1 << 23, 1 << 24, 3000).astype(F) for _ in range(2))
    c = np.ldexp(rng.integers(1 << 23, 1 << 24, 3000).astype(F), rng.integers(-4, 54, 3000)) * rng.choice(
        [F(-1), F(1)], 3000
    )
    c[::5] = (-(a.astype(np.float64) * b))[::5]  # what is left is the product's rounding error
    np.testing.assert_array_equal(fma(a, b, c), [exact(*numbers) for numbers in zip(a, b, c, strict=True)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_no_number_and_what_is_flushed():
    bad = fma(F([np.inf, np.inf, np.nan, 3e38]), F([1, 0, 1, 3e38]), F([1, 1, 1, 1]))
    np.testing.assert_array_equal(bad, F([np.inf, np.nan, np.nan, np.inf]))
    assert fma(F(2.0**-100), F(2.0**-27), F(0)) == 0
