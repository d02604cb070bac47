"""The campaign of arrays: it finds a planted difference, and a slice of it finds none. A night of it is a command."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.wiring import native
from tests.hostile.arrays import campaign as arrays
from tests.hostile.arrays.variants import Variant, variant


def planted(wrong):
    """An op whose native results are wrong where an element of x is more than 2.8."""

    def call(implementation, x):
        return [jnp.where((x > 2.8) & (implementation == "ffi"), wrong, x)]

    def operands(rng, count):
        return (rng.standard_normal((count, 5, 7)).astype(np.float32),)

    return Variant("planted", operands, call)


@pytest.mark.parametrize("wrong", [1.0, 2.9999998, np.nan])
def test_a_planted_difference_is_found_with_its_command(monkeypatch, wrong):
    monkeypatch.setattr(arrays, "variant", lambda seed, number: planted(wrong))
    reached, variants, found = arrays.run(3, 10_000, float("inf"), first=5)
    x = planted(wrong).operands(np.random.default_rng([3, 5, found.batch]), arrays.ARRAYS)[0]
    first = np.argwhere(x[found.array] > 2.8)[0]
    assert (found.seed, found.variant, variants) == (
        3,
        5,
        1,
    ) and reached == found.batch * arrays.ARRAYS + found.array + 1
    assert not (x[: found.array] > 2.8).any() and f"at {first.tolist()}" in found.places[0]
    assert f"python -m tests.hostile.arrays --seed 3 --variant 5 --isa {native.isa()}" in str(found)


def test_a_nan_may_be_another_only_where_said(monkeypatch):
    one = dataclasses.replace(planted(np.nan), any_nan=True)
    monkeypatch.setattr(arrays, "variant", lambda seed, number: one)
    assert arrays.run(3, 10_000, float("inf"))[2] is not None
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    ours, theirs = jax.device_put(nans[:1, None]), jax.device_put(nans[1:, None])
    assert arrays.same(ours, theirs, any_nan=True).all() and not arrays.same(ours, theirs, any_nan=False).any()


def test_a_seed_and_a_number_are_a_case():
    for number in range(40):
        one, same, other = variant(1, number), variant(1, number), variant(2, number)
        assert one.text == same.text != other.text
        drawn = [v.operands(np.random.default_rng([1, number, 0]), 2) for v in (one, same)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*drawn, strict=True))


@pytest.mark.slow
def test_native_bytes_are_the_references(isa):
    cases = 12 * 8 * arrays.ARRAYS
    reached, variants, difference = arrays.run(20, cases, float("inf"), batches=8, report=lambda line: None)
    assert difference is None and (reached, variants) == (cases, 12)
    assert jax.default_backend() == "cpu"
