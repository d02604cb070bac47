"""A minute of the soak; a night of it is a command. See soak_weight_sync."""

import json
import os

import pytest

from tests.helpers import run_python

SYNCS = 80

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="forks, and reads /proc")


@pytest.mark.slow
def test_every_fault_leaves_a_whole_version_and_no_rest():
    ran = run_python("-m", "tests.hostile.soak_weight_sync", "--syncs", str(SYNCS), "--seed", "7", timeout=1800)
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["syncs"] == SYNCS
    assert sum(count for what, count in said["counts"].items() if what.endswith(": failed")) >= SYNCS // 4
