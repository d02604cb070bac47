"""Arrays quantised in several ways, in one program, and what the oracle makes of them.

A way is (rounding, axis, rotation); with None for the axis it is both axes in one pass, whose rows are not rotated.
"""

import itertools

import jax

import jaxlowprec as jlp
from tests.against_oracle import assert_matches_quantized, quantized
from tests.ops.implementations import with_options

KEY = jax.random.key(7)
KEYS = {"nearest": None, "stochastic": KEY, "eden": KEY}
ROUNDINGS = ("nearest", "stochastic")  # which every format has


def ways(roundings=ROUNDINGS, axes=(-1, -2, None), rotations=(None,)):
    return tuple(itertools.product(roundings, axes, rotations))


def by_implementation(arrays, fmt, ways, implementation, given=None):
    """Each array in each way; `given` are further arguments that are arrays, for every axis the same."""
    return with_options(_in_every_way, implementation, fmt=fmt, ways=ways)(arrays, given or {})


def _in_every_way(arrays, given, *, fmt, ways, implementation):
    found = []
    for x, (rounding, axis, hadamard) in itertools.product(arrays, ways):
        how = {"rounding": rounding, "key": KEYS[rounding], "implementation": implementation, **given}
        if axis is not None:
            found.append(jlp.quantize(x, fmt, axis=axis, hadamard=hadamard or False, **how))
            continue
        how |= {"amax": (given["amax"],) * 2} if "amax" in given else {}
        found += jlp.quantize_both(x, fmt, hadamard_columnwise=hadamard or False, **how)
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
