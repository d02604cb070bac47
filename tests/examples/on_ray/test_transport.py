"""Ray's object store as a transport for weights."""

import doctest
import json

import numpy as np
import pytest

from jaxlowprec.weight_sync import Manifest, Refused
from jaxlowprec.weight_sync.bucket import pack
from tests.examples.on_ray.runs import EXAMPLES
from tests.helpers import python_environment, run_python

pytest.importorskip("ray", reason="Ray is not installed: pip install jaxlowprec[ray]")
from rl.on_ray import cluster, driver, rollouts, trainer, transport, worker  # noqa: E402


@pytest.mark.parametrize("module", [cluster, driver, rollouts, trainer, transport, worker])
def test_docstrings_say_what_happens(module):
    assert doctest.testmod(module).failed == 0


BUCKETS = [pack(1, i, i == 1, {name: np.full(3, i + 1.0, np.float32)}) for i, name in enumerate("ab")]
MANIFEST = Manifest(tuple(placed.entry for bucket in BUCKETS for placed in bucket.entries))


def send(inbox, sender, version, buckets=2):
    inbox.carry_out(sender, "pause", 1.0)
    inbox.carry_out(sender, "begin", version, MANIFEST)
    for i, name in list(enumerate("ab"))[:buckets]:
        bucket = pack(version, i, i == 1, {name: np.full(3, version + i, np.float32)})
        inbox.carry_out(sender, "send", bucket.header, bucket.payload)


def commit(inbox, sender, version):
    inbox.carry_out(sender, "commit", version, MANIFEST.hash)
    inbox.carry_out(sender, "resume")


def served(inbox):
    return {name: array.tolist() for name, array in inbox.weights.items()}


@pytest.mark.parametrize("sender", ["same", "next"])
def test_a_session_without_an_end_is_dropped_by_the_next(sender):
    inbox = transport.Inbox()
    send(inbox, "same", 5)
    commit(inbox, "same", 5)
    send(inbox, "same", 6, buckets=1)
    assert inbox.state == "receiving" and inbox.weights.version == 5
    send(inbox, sender, 7)
    assert served(inbox) == {"a": [5] * 3, "b": [6] * 3}
    commit(inbox, sender, 7)
    assert inbox.weights.version == 7 and served(inbox) == {"a": [7] * 3, "b": [8] * 3}


def test_only_another_trainer_may_go_back():
    inbox = transport.Inbox()
    send(inbox, "first", 5)
    commit(inbox, "first", 5)
    with pytest.raises(Refused, match="version 4 is stale; 5 is served"):
        send(inbox, "first", 4)
    send(inbox, "second", 4)
    assert inbox.weights.version == 5
    commit(inbox, "second", 4)
    assert inbox.weights.version == 4 and served(inbox) == {"a": [4] * 3, "b": [5] * 3}
    with pytest.raises(Refused, match="trainer 'second' has the session, not 'first'"):
        inbox.carry_out("first", "begin", 6, MANIFEST)


@pytest.mark.slow
def test_one_put_serves_all_receivers_without_a_copy():
    path = f"{python_environment()['PYTHONPATH']}:{EXAMPLES}"
    said = json.loads(run_python("-m", "tests.examples.on_ray.receiving", PYTHONPATH=path).stdout.splitlines()[-1])
    assert said["buckets"] == said["puts"] == 2
    assert said["whole"] == [True, True] and said["in the store"] == [True, True]
    assert "checksum" in said["damage"] and said["whole after damage"]
    assert said["death"].startswith("version: the actor ")
    assert said["after the death"].startswith("begin: not sent, because an earlier call failed: version: ")
