"""A quantised model is the same in the receiver, whatever carried it, in whichever form it is served."""

import contextlib

import pytest

from jaxlowprec.weight_sync import Receiver, WeightSource, differences, push
from jaxlowprec.weight_sync.folders.delta import DeltaTransport
from jaxlowprec.weight_sync.folders.directory import DirectoryTransport
from jaxlowprec.weight_sync.folders.pulling import pull
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from tests.checkpoints.weights import SCHEMES
from tests.weight_sync.receiving.test_forms import RULES
from tests.weight_sync.syncing import SECRET
from tests.weight_sync.trees import MAPPING, llama


@contextlib.contextmanager
def over_tcp(receiver, path):
    with TcpReceiver(receiver, SECRET) as listening:
        transport = TcpTransport(*listening.address, SECRET, timeout=60)
        yield lambda source: push(source, transport, max_bytes=20_000)


@contextlib.contextmanager
def over_a_disk(receiver, path, kind=DirectoryTransport):
    transport = kind(path)

    def carry(source):
        push(source, transport, max_bytes=20_000)
        pull(path, receiver)

    yield carry


WAYS = {
    "tcp": over_tcp,
    "directory": over_a_disk,
    "delta": lambda receiver, path: over_a_disk(receiver, path, DeltaTransport),
}


@pytest.mark.parametrize("form", ["published", "plain", "gptq"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_served_is_what_was_sent(way, form, tmp_path):
    receiver = Receiver(form=form)
    with way(receiver, tmp_path) as carry:
        for version in (1, 2, 3):
            source = WeightSource(llama(seed=version), MAPPING, SCHEMES["w4a16"], quantize=RULES)
            carry(source)
            assert receiver.version == version and receiver.weights.form == form
            assert differences(source, receiver) == []
