"""Whichever process is killed, at whichever moment: the engine serves a complete version, and the next sync works."""

import json
import os
import pathlib
import time

import pytest

from tests.helpers import often, run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="forks, and reads /proc")


def kill(kind, kills, tmp_path):
    """What was seen, by who was killed; one process is started for both."""
    ran = run_python("-m", "tests.weight_sync.killing", kind, str(kills), str(tmp_path))
    return json.loads(ran.stdout.splitlines()[-1])


def named_memory():
    return {path.name for path in pathlib.Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("kind", often(["shared"], ["shared", "tcp"]))
def test_a_kill_at_any_moment_leaves_a_complete_version(kind, kills, tmp_path):
    before = named_memory()
    seen = kill(kind, kills, tmp_path)
    assert set(seen) == {"trainer", "engine"}
    for saw in seen.values():
        assert saw["torn"] == 0 and len(saw["versions"]) == kills
        assert saw["states"].get("receiving", 0) >= kills // 10  # the kills were within syncs
        descriptors = saw["descriptors"]
        assert max(descriptors[-10:]) <= max(descriptors[:10]) + 2
    versions = seen["trainer"]["versions"]
    assert versions == sorted(versions) and versions[-1] >= kills
    until = time.monotonic() + 60
    while (left := named_memory() - before) and time.monotonic() < until:
        time.sleep(0.1)  # those of other tests go
    assert not left
