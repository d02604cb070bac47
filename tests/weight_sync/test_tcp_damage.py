"""What damages the bytes between a trainer and a receiver, anywhere in a sync, in either direction.

A relay between the two flips a bit, cuts the connection, leaves bytes out, sends some twice, or out of order.
"""

import contextlib
import socket
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.sockets import close
from jaxlowprec.weight_sync.tcp import TcpTransport
from tests.weight_sync.syncing import SECRET, is_whole, over_tcp, sync

PATIENCE = 0.4


def flip(data, at, bit):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


DAMAGE = {
    "flip": lambda data, at, size: flip(data, at, size % 8),
    "cut": lambda data, at, size: None,
    "drop": lambda data, at, size: data[:at] + data[at + size :],
    "repeat": lambda data, at, size: data[: at + size] + data[at:],
    "swap": lambda data, at, size: (
        data[:at] + data[at + size : at + 2 * size] + data[at : at + size] + data[at + 2 * size :]
    ),
}


class Relay:
    """Listens, and passes one connection on to an address, with one kind of damage at one place of one direction."""

    def __init__(self, address, kind, to_engine, place, size):
        self._address, self._kind, self._to_engine, self._place, self._size = address, kind, to_engine, place, size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.damaged = False
        self._ends = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self):
        with contextlib.suppress(OSError):
            trainer = self._listener.accept()[0]
            engine = socket.create_connection(self._address)
            self._ends += [trainer, engine]
            back = threading.Thread(target=self._pass, args=(engine, trainer, not self._to_engine))
            self._threads.append(back)
            back.start()
            self._pass(trainer, engine, self._to_engine)

    def _pass(self, source, target, damages):
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                at = self._place - seen
                seen += len(data)
                if damages and 0 <= at < len(data):
                    changed = DAMAGE[self._kind](data, at, self._size)
                    self.damaged = changed != data
                    if changed is None:
                        target.sendall(data[:at])
                        break
                    data = changed
                target.sendall(data)
        close(source)
        close(target)

    def close(self):
        self._listener.close()
        with contextlib.suppress(OSError):  # wakes it if nobody came
            socket.create_connection(self.address, 0.1).close()
        for end in self._ends:
            close(end)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()


@pytest.mark.parametrize("to_engine", [True, False])
@pytest.mark.parametrize("kind", DAMAGE)
@settings(max_examples=12)
@given(place=st.integers(0, 21000), size=st.integers(1, 40))
@example(place=0, size=1)  # of the handshake's first byte
@example(place=75, size=8)  # of the first frame
def test_after_damage_the_old_or_the_new_version_is_served_whole_and_the_next_sync_gets_through(
    kind, to_engine, place, size
):
    with over_tcp(timeout=PATIENCE, handshake_timeout=PATIENCE) as (receiver, listening, transport, engine):
        sync(transport, 1)
        relay = Relay(listening.address, kind, to_engine, place if to_engine else place % 900, size)
        damaged = TcpTransport(*relay.address, SECRET, timeout=PATIENCE)
        started, failed = time.monotonic(), False
        try:
            sync(damaged, 2, timeout=PATIENCE)
        except SyncError:
            failed = True
        relay.close()
        assert time.monotonic() - started < 8 * PATIENCE
        until = time.monotonic() + 5
        while (receiver.state != "serving" or engine.paused) and time.monotonic() < until:
            time.sleep(0.005)
        assert receiver.state == "serving" and not engine.paused
        assert receiver.version in (1, 2) and is_whole(receiver.weights, receiver.version)
        assert failed or receiver.version == 2
        if relay.damaged and to_engine:
            assert failed  # nothing that was changed is taken for what was sent
        damaged.close()
        sync(transport, 3)
        assert is_whole(receiver.weights, 3)
