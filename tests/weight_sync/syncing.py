"""Small models, whose numbers say which version they are of, and syncs of them."""

import contextlib
import threading

import numpy as np
import pytest

from jaxlowprec.weight_sync.bucket import pack
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport

SECRET = b"a secret of the tests, of 32 B .."
SHAPES = {"embed": (64, 16), "layer.0.q": (31, 7), "layer.0.k": (5,), "norm": (), "empty": (0, 3), "head": (128, 33)}


def model(version):
    """Arrays that are full of their version."""
    return {name: np.full(shape, version, np.int32) for name, shape in SHAPES.items()}


def is_whole(weights, version):
    """Whether weights are exactly what `model` gives."""
    expected = model(version)
    return set(weights) == set(expected) and all(np.array_equal(weights[name], expected[name]) for name in expected)


def packed(arrays, version, buckets=3):
    """(manifest, buckets) of a version."""
    names = list(arrays)
    groups = [group.tolist() for group in np.array_split(np.asarray(names, object), buckets)]
    made = [
        pack(version, index, index == len(groups) - 1, {name: arrays[name] for name in group})
        for index, group in enumerate(groups)
    ]
    return Manifest(tuple(placed.entry for bucket in made for placed in bucket.entries)), made


def sync(transport, version, arrays=None, timeout=60.0, buckets=3):
    """One whole session."""
    manifest, made = packed(model(version) if arrays is None else arrays, version, buckets)
    transport.pause(timeout)
    try:
        transport.begin(version, manifest, timeout)
        for bucket in made:
            transport.send(bucket, timeout)
        transport.commit(version, manifest.hash, timeout)
    except BaseException:
        transport.abort("it failed", timeout)
        raise
    finally:
        transport.resume(timeout)


def connected(listening):
    """The channel of a trainer that has proved the secret, and may say what it likes."""
    return TcpTransport(*listening.address, SECRET, timeout=60)._dial(60)


class Engine:
    """What a receiver stops and lets go on."""

    def __init__(self):
        self.paused = 0
        self.resumed = threading.Event()

    def pause(self, timeout):
        self.paused += 1
        self.resumed.clear()

    def resume(self):
        self.paused -= 1
        self.resumed.set()


@contextlib.contextmanager
def over_tcp(**options):
    """(receiver, listening, a new transport, engine)."""
    engine = Engine()
    receiver = Receiver(on_pause=engine.pause, on_resume=engine.resume)
    with TcpReceiver(receiver, SECRET, **{"handshake_timeout": 60.0, **options}) as listening:
        yield receiver, listening, TcpTransport(*listening.address, SECRET, timeout=60), engine


def require_refused_shape(transport):
    """Sends version 2, after version 1, with a tensor of another shape: `begin` has to refuse it."""
    name, array = next(iter(model(2).items()))
    message = f"begin: {name!r} of version 2 has shape .*, and .* in version 1.*new transport"
    with pytest.raises(Refused, match=message):
        sync(transport, 2, model(2) | {name: np.stack([array, array])})
