"""Arrays quantised in several ways, in one compilation, and what the oracle makes of them.

A way is (rounding, axis, rotation); with None for the axis it is both axes in one pass, whose rows are not rotated.
"""

import functools
import itertools

import jax

import jaxlowprec as jlp
from tests.against_oracle import assert_matches_quantized, quantized

KEY = jax.random.key(7)
KEYS = {"nearest": None, "stochastic": KEY, "eden": KEY}
ROUNDINGS = ("nearest", "stochastic")  # which every format has


def ways(roundings=ROUNDINGS, axes=(-1, -2, None), rotations=(None,)):
    return tuple(itertools.product(roundings, axes, rotations))


@functools.partial(jax.jit, static_argnames=("fmt", "ways", "implementation"))
def by_implementation(arrays, fmt, ways, implementation, given=None):
    """Each array in each way; `given` are further arguments that are arrays, for every axis the same."""
    found = []
    for x, (rounding, axis, hadamard) in itertools.product(arrays, ways):
        how = hadamard or False, rounding, KEYS[rounding]
        options = given or {}
        if axis is not None:
            found.append(jlp.quantize(x, fmt, axis, *how, implementation=implementation, **options))
            continue
        options = options | ({"amax": (options["amax"],) * 2} if "amax" in options else {})
        found += jlp.quantize_both(x, fmt, *how, implementation=implementation, **options)
    return found


def by_oracle(arrays, fmt, ways, **given):
    """What `by_implementation` must give."""
    found = []
    for x, (rounding, axis, hadamard) in itertools.product(arrays, ways):
        both = [(-1, None), (-2, hadamard)] if axis is None else [(axis, hadamard)]
        found += [quantized(x, fmt, *one, rounding, KEYS[rounding], **given) for one in both]
    return found


def assert_all_match(found, expected, message=""):
    for q, wanted in zip(found, expected, strict=True):
        assert_matches_quantized(q, wanted, message)


def assert_gives_the_oracles(implementation, arrays, fmt, ways):
    assert_all_match(by_implementation(arrays, fmt, ways, implementation), by_oracle(arrays, fmt, ways))
