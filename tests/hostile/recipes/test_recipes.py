"""The campaign of arguments: it finds planted faults, and a slice of it finds none. An hour of it is a command."""

import time

import pytest

from tests.hostile.recipes.call import Call
from tests.hostile.recipes.calls import CALLS
from tests.hostile.recipes.campaign import Fault, TooLong, attack, outcome, run
from tests.hostile.recipes.values import Asked, names, value


def raises(error):
    def function(**_):
        raise error

    return function


def fails():
    assert value("0"), "planted"


def runs_on():
    while time.monotonic():
        pass


PLANTED = {
    "AssertionError": fails,
    "AttributeError": lambda: value("3").ndim,
    "IndexError": lambda: ()[0],
    "ZeroDivisionError": lambda: 1 // 0,
    "KeyError": lambda: {}["missing"],
    "RecursionError": raises(RecursionError()),
    "MemoryError": raises(MemoryError()),
    "took more than 0.2 s": runs_on,
    "without a sentence": raises(ValueError("3")),
    "of somebody else's": raises(TypeError("unsupported operand; needs a number")),
    "says nothing of what": raises(ValueError("planted: x=3 is wrong")),
    "no terminal should get": raises(ValueError("planted: x=\x1b[31m; needs a number")),
    "of 5017 characters": raises(ValueError("planted: needs an" + " x" * 2500)),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault):
    names()  # takes longer than the limit when it is first asked
    with pytest.raises(Fault, match=fault):
        outcome(Call(("planted",), PLANTED[fault], {}), {}, seconds=0.2)


def test_what_is_refused_in_a_sentence_or_accepted_is_no_fault():
    refused = raises(NotImplementedError("planted: x=3; needs a number"))
    assert outcome(Call(("planted",), refused, {}), {}) == "refused"
    assert outcome(Call(("planted",), raises(Asked()), {}), {}) == "refused"
    assert outcome(Call(("planted",), lambda x: x, {}), {"x": object()}) == "accepted"
    with pytest.raises(TooLong):
        raises(TooLong())()


def test_a_fault_is_reported_with_the_simplest_arguments():
    def planted(x, y=None, z=None):
        return x.ndim if z != "nearest" else x.missing

    calls = (Call(("planted",), planted, {"x": "x"}, ("y", "z")),)
    ran, (case, fault) = attack(0, seed=1, count=500, calls=calls)
    assert ran and "AttributeError" in str(fault) and "y" not in dict(case.arguments)
    assert run(1, 500, float("inf"), calls, report=lambda line: None)[1] == 1


def test_arguments_that_fit_are_there():
    assert {fitting for call in CALLS for fitting in call.fitting.values()} <= set(names())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.who[0])
def test_arguments_that_fit_have_no_fault(call):
    outcome(call, {name: value(given) for name, given in call.fitting.items()})


@pytest.mark.slow
def test_every_call_gives_a_result_or_says_what_it_needs():
    said = []
    total, faults = run(20, 6 * len(CALLS), float("inf"), report=said.append)
    assert not faults, "\n".join(said)
    assert total >= len(CALLS)
