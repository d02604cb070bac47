"""SIGKILL of one side of one sync. What is checked after each kill is in `killing_one_sync.py`; see test_kills too.

Thousands of them: `python -m tests.hostile.soak_weight_sync`.
"""

import json

import pytest

from tests.helpers import run_python

KILLS = [12, pytest.param(100, marks=pytest.mark.every_case)]


def outcomes(case, kills):
    """Of a process of its own: this one has threads, and perhaps a JAX backend, and must not fork."""
    done = run_python("-m", "tests.weight_sync.killing_one_sync", case, str(kills), str(kills), timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("case", ["directory_trainer", "delta_trainer"])
def test_a_killed_trainer_leaves_a_whole_version(case, kills):
    found = outcomes(case, kills)
    assert found["old"] + found["new"] == kills
    assert found["unfinished"] >= kills // 4 and found["old"] >= kills // 20  # they did hit syncs that were under way


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_receiver_is_an_error_and_a_new_one_is_served(kills):
    found = outcomes("tcp_receiver", kills)
    assert found["in time"] == kills
    assert found["errors"] >= kills // 4


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS)
def test_a_receiver_killed_while_it_pulls_can_be_started_again(kills):
    assert outcomes("disk_receiver", kills)["unfinished"] >= kills // 4
