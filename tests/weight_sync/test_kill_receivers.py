"""Eight receivers, of which two are killed and one hangs: the other five get each version whole, in bounded time."""

import json
import os

import pytest

from tests.helpers import run_python
from tests.weight_sync.killing_receivers import TIMEOUT

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="forks, and reads /proc")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_dead_and_stopped_receivers_hold_no_other_back(kind, rounds, tmp_path):
    ran = run_python("-m", "tests.weight_sync.killing_receivers", kind, str(rounds), str(tmp_path))
    saw = json.loads(ran.stdout.splitlines()[-1])
    assert saw["torn"] == 0
    assert saw["served"] == saw["failed"] == [["3", "4", "5", "6", "7"]] * rounds
    assert max(saw["seconds"]) < 2.5 * TIMEOUT  # three that do not answer are waited for at once
    assert all(state == "serving" and 1 <= version <= 4 for state, version in saw["stopped"])
