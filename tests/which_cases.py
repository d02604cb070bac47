"""Which cases of the suite run: few, with --slow those of all pairs of values, with --every-case all.

Most mistakes show where two parameters have certain values; a function with hundreds of cases compiles for minutes.
"""

import collections
import itertools

import pytest

MANY = 30
"""Functions with more cases than this run by pairs."""


def skip_slow_ones(items):
    """Skips tests marked slow; of a function marked sampled(n), and of all functions of such a module, it leaves every
    n-th case. As n is prime, these have every instruction set."""
    seen = collections.Counter()
    for item in items:
        function, sampled = _function(item), item.get_closest_marker("sampled")
        if {"slow", "every_case"} & set(item.keywords):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
            continue
        if sampled and seen[function] % sampled.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"one of {sampled.args[0]} cases runs; run more with --slow"))
        seen[function] += 1


def keep_pairs(config, items):
    """Leaves out what is marked every_case; of a function with many cases, leaves so many that any two values of two
    parameters meet in one of them.

    Parameters are those of fixtures, too. Five, four, three, two and two values are 240 cases, and about 20 by pairs.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if "every_case" not in item.keywords:
            cases[_function(item)].append(item)
    chosen = {item for found in cases.values() for item in (found if len(found) <= MANY else covering(found))}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def covering(cases):
    """Cases of one function in which each value, and each pair of values that a case has, occurs."""
    pairs = {case: _pairs(case.callspec.params) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def _pairs(parameters):
    """Single values and pairs of them, as texts that tell them apart."""
    values = [f"{name}={_identity(value)}" for name, value in sorted(parameters.items())]
    return {some for size in (1, 2) for some in itertools.combinations(values, size)}


def _identity(value):
    """The same for the same value of a parameter: a case has the very object that the list of values has."""
    return (type(value), value) if isinstance(value, str | int | float) else id(value)


def _function(item):
    return item.nodeid.partition("[")[0]
