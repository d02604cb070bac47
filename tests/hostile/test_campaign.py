"""The campaign: it finds what is planted, what once broke holds, and a few minutes of new cases find nothing."""

import resource
import signal

import pytest

from tests.hostile.campaign import attack_through, kept
from tests.hostile.limits import MEMORY, Isolated, allowed_seconds
from tests.hostile.mutation import Mutator
from tests.hostile.targets import TARGETS
from tests.hostile.worker import limit_memory, outcome_of

CASES = {"convert": 60, "dequantize": 100, "telemetry": 60}
MOST_CASES = 120  # of the other targets; `python -m tests.hostile` goes on from there


SHORT = {"gguf": 10, "to_gguf": 10, "decoder_config": 20, "patterns": 20, "telemetry": 4, "policy_log": 40}
"""Cases of a default run, in its own process."""


def cases_of(target):
    """How many new cases of a target a slow run draws."""
    return CASES.get(target, MOST_CASES)


def late(*_):
    raise TimeoutError("took longer than a case may")


@pytest.mark.parametrize("target", SHORT)
def test_a_few_new_cases_break_nothing(target, tmp_path):
    mutator, memory = Mutator(target, TARGETS[target].seeds()), resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, late)
    try:
        limit_memory(MEMORY)
        for _ in range(SHORT[target]):
            data = mutator.case(TARGETS[target].changed)
            signal.setitimer(signal.ITIMER_VIRTUAL, allowed_seconds(data))
            outcome = outcome_of(TARGETS[target], data, tmp_path)
            assert outcome["kind"] != "broke", outcome["detail"]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


@pytest.mark.slow
def test_it_finds_every_planted_fault_and_goes_on():
    found = {
        b"error": "raised KeyError: \"'missing'\" at ?",
        b"signal": "was ended by SIGSEGV",
        b"end": "ended with status 3",
        b"slow": "took 5.3 s for 4 bytes; allowed 5.0 s",
        b"memory": "raised MemoryError",
        b"long": "refused by a Refused of 7000 characters",
        b"escape": "refused by a Refused with characters that no terminal should get",
        b"riddle": "refused by a Refused without a sentence",
    }
    with Isolated("planted") as worker:
        for data, detail in found.items():
            outcome = worker.run(data)
            assert outcome.kind == "broke" and detail in outcome.detail
            assert worker.run(b"accepted").kind == "accepted"
            assert worker.run(b"refused").kind == "refused"


def test_the_same_seed_gives_the_same_cases():
    drawn = [[Mutator(seed, [b'{"a": [1, 2]}']).case() for _ in range(1)] for seed in ("x", "x", "y")]
    assert drawn[0] == drawn[1] != drawn[2]
    mutator = Mutator("x", [b'{"a": [1, 2]}'])
    assert len({mutator.case() for _ in range(100)}) > 60


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_what_once_broke_and_new_cases_break_nothing(target):
    """In one process, whose start takes as long as hundreds of cases."""
    count = cases_of(target)
    with Isolated(target) as worker:
        for path, data in kept(target):
            outcome = worker.run(data)
            assert outcome.kind != "broke", f"{path.name}: {outcome.detail}"
        counts, failures = attack_through(worker, target, "continuous integration", count)
    assert not failures, f"{counts}; python -m tests.hostile --seed 'continuous integration' --target {target}"
    assert counts["accepted"] and counts.total() == count
