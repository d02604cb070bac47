"""Which cases of the suite run: each value of a parameter, with --slow each pair of values, with --every-case all.

Most mistakes show where two parameters have certain values; a function with hundreds of cases compiles for minutes.
"""

import collections
import itertools

import pytest

FEW, MANY = 4, 8
"""Functions with more cases than this run by single values, and with --slow by pairs."""


def keep_values(config, items):
    """Skips tests marked slow; of a function with more than a few cases, leaves so many that each value of a parameter
    is in one of them. So each instruction set is there, and each format.

    Of a function marked sampled(n), whose single parameters have many values, it leaves every n-th case. As n is prime,
    these have every instruction set. Tests for GPUs keep all cases: they are fast there, and a GPU is rare.
    """
    kept, others, seen = [], [], collections.Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if {"slow", "every_case"} & set(item.keywords):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if {"slow", "every_case", "gpu"} & set(item.keywords):
            kept.append(item)
            continue
        others += [] if sampled and seen[_function(item)] % sampled.args[0] else [item]
        seen[_function(item)] += 1
    _keep(config, items, {*kept, *_covering_many(others, FEW, 1)})


def keep_pairs(config, items):
    """Leaves out what is marked every_case; of a function with many cases, leaves so many that any two values of two
    parameters meet in one of them.

    Parameters are those of fixtures, too. Five, four, three, two and two values are 240 cases, and about 20 by pairs.
    """
    _keep(config, items, _covering_many((item for item in items if "every_case" not in item.keywords), MANY, 2))


def _keep(config, items, chosen):
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _covering_many(items, most, size):
    """The items, but of functions with more than so many cases only covering ones."""
    cases = collections.defaultdict(list)
    for item in items:
        cases[_function(item)].append(item)
    return {item for found in cases.values() for item in (found if len(found) <= most else covering(found, size))}


def covering(cases, size):
    """Cases of one function in which each value occurs, and with a size of 2 each pair of values that a case has."""
    combinations = {case: _combinations(case.callspec.params, size) for case in cases}
    missing = set().union(*combinations.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(combinations[case] & missing)))
        missing -= combinations[chosen[-1]]
    return chosen


def _combinations(parameters, most):
    """Single values, and up to so many of them together, as texts that tell them apart."""
    values = [f"{name}={_identity(value)}" for name, value in sorted(parameters.items())]
    return {some for size in range(1, most + 1) for some in itertools.combinations(values, size)}


def _identity(value):
    """The same for the same value of a parameter: a case has the very object that the list of values has."""
    if isinstance(value, int):
        return type(value), hex(value)  # decimal digits of large numbers take long
    return (type(value), value) if isinstance(value, str | float) else id(value)


def _function(item):
    return item.nodeid.partition("[")[0]
