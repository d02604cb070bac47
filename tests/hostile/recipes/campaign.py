"""Recipes, formats, roles, layers and public functions, called with arguments that nobody should pass.

    python -m tests.hostile.recipes --cases 100000 --minutes 60 --seed 1

Hypothesis draws a call whose arguments fit and puts something else in the place of one or two of them. The call then
gives a result or raises TypeError, ValueError or NotImplementedError, in a sentence that names who refuses and what is
needed. Anything else is a fault: another error, an error of somebody else's, a riddle, more than a few seconds. Calls
are traced (`jax.eval_shape`), which is where arguments are checked, and nothing is compiled. Each call that has a fault
is reported once, with the fewest and simplest arguments that Hypothesis finds.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.errors
import hypothesis
import jax
from hypothesis import strategies

import jaxlowprec as jlp
from tests.hostile.recipes.calls import CALLS
from tests.hostile.recipes.values import Asked, names, value
from tests.hostile.worker import fault_of, place_of

REFUSALS = (TypeError, ValueError, NotImplementedError)
NEEDED = re.compile(
    r"\b(needs?|pass|use|leave|takes?|must|out of range|there is no|quantise|is for|fit|differ|explicitly)\b|: True"
)
SECONDS = 20.0
"""Of processor time, which a loaded machine does not change, that a call may take; tracing takes tenths."""


class Fault(Exception):
    """Of a call: neither a result nor a refusal."""


class TooLong(BaseException):
    """Not an Exception, so that nothing between catches it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and arguments by the names of their values."""

    call: int
    arguments: tuple[tuple[str, str], ...]

    def __str__(self):
        return f"{CALLS[self.call].who[0]}({', '.join(f'{name}={given}' for name, given in self.arguments)})"


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TooLong in what takes more processor time."""

    def end(*_):
        raise TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fault_of_refusal(call, arguments, said):
    """What keeps an error's text from being a sentence of who refuses and what is needed; "" if nothing does."""
    if "*" in call.who and any(arguments.get("recipe") is none for none in (None, jlp.FROM_CONTEXT)):
        return ""
    if fault := fault_of(said):
        return fault
    if not any(who in said for who in call.who):
        return "of somebody else's"
    return "" if NEEDED.search(said) else "that says nothing of what is needed"


def outcome(call, arguments, seconds=SECONDS):
    """Calls; "accepted" or "refused", or raises Fault."""
    try:
        with time_limit(seconds):
            if call.traced:
                jax.eval_shape(lambda: (call.function(**arguments), None)[1])
            else:
                call.function(**arguments)
    except REFUSALS as error:
        fault = fault_of_refusal(call, arguments, str(error))
        if fault:
            raise Fault(f"a {type(error).__name__} {fault} at {place_of(error)}: {str(error)[:300]!r}") from None
        return "refused"
    except Asked:
        return "refused"
    except flax.errors.FlaxError as error:
        if "*" not in call.who:
            raise Fault(f"{type(error).__name__} at {place_of(error)}: {str(error)[:300]!r}") from None
        return "refused"
    except TooLong:
        raise Fault(f"it took more than {seconds:g} s") from None
    except Exception as error:
        raise Fault(f"{type(error).__name__} at {place_of(error)}: {str(error)[:300]!r}") from None
    return "accepted"


def run_case(case, calls=CALLS):
    """Calls with the values that a case names."""
    return outcome(calls[case.call], {name: value(given) for name, given in case.arguments})


@strategies.composite
def cases_of(draw, index, calls=CALLS):
    """Of one call: up to three arguments are not as they should be, or not there."""
    call = calls[index]
    hostile = draw(strategies.lists(strategies.sampled_from((*call.fitting, *call.others)), max_size=3, unique=True))
    chosen = call.fitting | {name: draw(strategies.sampled_from(names())) for name in hostile}
    return Case(index, tuple(sorted(chosen.items())))


def attack(index, seed, count, deadline=float("inf"), calls=CALLS):
    """Draws cases of one call until there were so many, or until a moment of `time.monotonic`.

    Returns:
        how many there were, and the simplest case with a fault and what that is, or None.
    """
    ran, found = 0, None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases_of(index, calls))
    def none_has_a_fault(case):
        nonlocal ran, found
        if time.monotonic() > deadline:
            return
        ran += 1
        try:
            run_case(case, calls)
        except Fault as fault:
            found = case, fault
            raise

    with contextlib.suppress(Fault):
        none_has_a_fault()
    return ran, found


def run(seed, count, minutes, calls=CALLS, report=print):
    """The cases run and the calls that have a fault; all calls get the same number of cases."""
    start, total, faults = time.monotonic(), 0, 0
    for index in range(len(calls)):
        deadline = start + 60 * minutes * (index + 1) / len(calls)
        ran, found = attack(index, seed, max(1, count // len(calls)), deadline, calls)
        total += ran
        if found:
            faults += 1
            report(f"{found[0]}\n  {found[1]}")
        jax.clear_caches()
    return total, faults


def main(arguments=None):
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.recipes", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of all calls together")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all calls together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    total, faults = run(options.seed, options.cases, options.minutes)
    took = f"{time.monotonic() - start:,.0f} s"
    print(f"{total:,} cases of {len(CALLS)} calls, seed {options.seed}, in {took}: {faults} calls with a fault")
    return int(faults > 0)
