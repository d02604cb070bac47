"""A version's file that becomes shorter while it is read refuses the version, and never ends the process."""

import json

import pytest

from tests.helpers import run_python

# In a process of its own: a mapped file that is cut short would end it by a signal.
SHRINKING = """
import json, logging, os, pathlib, sys

import numpy as np

from jaxlowprec.weight_sync import DeltaTransport, Receiver, Refused, pull
from jaxlowprec.weight_sync.folders.delta import Changes
from tests.weight_sync.syncing import sync

root = pathlib.Path(sys.argv[1])


def weights(version):
    "`whole` changes everywhere, `some` in one place."
    some = np.zeros(10_000, np.int32)
    some[:version] = version
    return {"some": some, "whole": np.full(10_000, version, np.int32)}


def published(path, versions):
    transport = DeltaTransport(path)
    for version in range(1, versions + 1):
        sync(transport, version, weights(version))
    return transport


def cut(folder):
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 4096 if file.stat().st_size > 8192 else 512)  # the header is still there


def pulled(name, versions, cut_short):
    "What pull says of a folder, one version of which is cut short once all files are open."
    path = root / name
    published(path, versions)
    receiver = Receiver()
    begin = receiver.begin

    def shrinking(*arguments):
        cut(path / cut_short)
        begin(*arguments)

    receiver.begin = shrinking
    try:
        pull(path, receiver)
    except Refused as error:
        return [str(error), receiver.version, receiver.state]


class Saying(logging.Handler):
    def __init__(self, said):
        super().__init__()
        self.said = said

    def emit(self, record):
        self.said.append(record.getMessage())


def published_anew():
    "What the trainer says that reads its own version back."
    path, said = root / "trainer", []
    transport = published(path, 1)
    logging.getLogger().addHandler(Saying(said))
    apply = Changes.apply

    def shrinking(self, *arguments):
        cut(path / "v000002-delta")
        apply(self, *arguments)

    Changes.apply = shrinking
    sync(transport, 2, weights(2))
    Changes.apply = apply
    sync(transport, 3, weights(3))
    receiver = Receiver()
    pull(path, receiver)
    return said + [receiver.version]


print(json.dumps({
    "complete": pulled("complete", 1, "v000001"),
    "delta": pulled("delta", 2, "v000002-delta"),
    "base of a delta": pulled("base", 2, "v000001"),
    "trainer": published_anew(),
}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each reader of a folder says when a file is cut short after it was opened."""
    return json.loads(run_python("-c", SHRINKING, str(tmp_path_factory.mktemp("shrinking"))).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["complete", "delta", "base of a delta"])
def test_a_version_cut_short_while_pulled_is_refused(said, kind):
    message, version, state = said[kind]
    assert "became shorter while it was read" in message and "publish another complete version" in message
    assert (version, state) == (0, "serving")


def test_a_version_cut_short_makes_the_next_one_complete(said):
    message, version = said["trainer"]
    assert "the next version will be complete" in message and "became shorter" in message
    assert version == 3
