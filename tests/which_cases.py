"""Which cases of the suite run: each value of a parameter, with --slow each pair of values, with --every-case all.

Most mistakes show where two parameters have certain values; a function with hundreds of cases compiles for minutes. The
choice is made while pytest multiplies a function's parameters: a case that does not run never becomes a test.
"""

import itertools

FEW, MANY = 4, 8
"""Functions with more cases than this run by single values, and with --slow by pairs."""


def choose(metafunc):
    """Leaves of a function's cases those that run in this mode.

    By default, of a function with more than a few cases, so many run that each value of a parameter is in one of them;
    of one marked sampled(n), whose single parameters have many values, every n-th before that. With --slow, any two
    values of two parameters meet in a case: five, four, three, two and two values are 240 cases, and about 20 by pairs.
    The values of fixtures count, too. Tests for GPUs keep all cases: they are fast there, and a GPU is rare.
    """
    calls = metafunc._calls  # the product of all parameters, for which pytest has no public name
    marks, option = metafunc.definition.get_closest_marker, metafunc.config.getoption
    if len(calls) < 2 or option("--every-case") or marks("gpu"):
        return
    chosen = [call for call in calls if not _too_slow({mark.name for mark in call.marks}, option)]
    if option("--slow"):
        chosen = covering(chosen, 2) if len(chosen) > MANY else chosen
    else:
        chosen = chosen[:: marks("sampled").args[0]] if marks("sampled") else chosen
        chosen = covering(chosen, 1) if len(chosen) > FEW else chosen
    calls[:] = (
        chosen or calls[:1]
    )  # without any, pytest would call the function without arguments: `leave_out` drops it


def leave_out(config, items):
    """Drops the tests that are marked slow or every_case, unless the options ask for them."""
    dropped = [item for item in items if _too_slow(item.keywords, config.getoption)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


def _too_slow(marks, option):
    return ("slow" in marks and not option("--slow")) or ("every_case" in marks and not option("--every-case"))


def covering(cases, size):
    """Cases of one function in which each value occurs, and with a size of 2 each pair of values that a case has."""
    combinations = [(case, _combinations(case.params, size)) for case in cases]
    missing = set().union(*(found for _, found in combinations))
    chosen = []
    while missing:
        case, found = max(combinations, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= found
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
