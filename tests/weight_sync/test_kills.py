"""Whichever process is killed, at whichever moment: the engine serves a complete version, and the next sync works."""

import json
import os
import pathlib

import pytest

from tests.helpers import often, run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="forks, and reads /proc")


def kill(kind, victim, kills, tmp_path):
    ran = run_python("-m", "tests.weight_sync.killing", kind, victim, str(kills), str(tmp_path))
    return json.loads(ran.stdout.splitlines()[-1])


def named_memory():
    return sorted(path.name for path in pathlib.Path("/dev/shm").iterdir())


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("victim", ["trainer", "engine"])
@pytest.mark.parametrize("kind", often(["shared"], ["shared", "tcp"]))
def test_a_kill_at_any_moment_leaves_a_complete_version(kind, victim, kills, tmp_path):
    before = named_memory()
    saw = kill(kind, victim, kills, tmp_path)
    assert saw["torn"] == 0 and len(saw["versions"]) == kills
    assert saw["states"].get("receiving", 0) >= kills // 10  # the kills were within syncs
    if victim == "trainer":
        assert saw["versions"] == sorted(saw["versions"]) and saw["versions"][-1] >= kills
    descriptors = saw["descriptors"]
    assert max(descriptors[-10:]) <= max(descriptors[:10]) + 2
    assert named_memory() == before
