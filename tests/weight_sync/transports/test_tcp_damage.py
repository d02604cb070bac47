"""What damages the bytes between a trainer and a receiver, anywhere in a sync, in either direction. See `relay.py`."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from tests.weight_sync.relay import DAMAGE, Relay
from tests.weight_sync.syncing import SECRET, is_whole, over_tcp, sync

PATIENCE = 0.4


@pytest.mark.parametrize("to_engine", [True, False])
@pytest.mark.parametrize("kind", DAMAGE)
@settings(max_examples=12)
@given(place=st.integers(0, 21000), size=st.integers(1, 40))
@example(place=0, size=1)  # of the first byte of TLS
@example(place=700, size=8)  # of the proof or the first frames
def test_damage_leaves_a_whole_version(kind, to_engine, place, size):
    with (
        over_tcp() as (receiver, _, transport, engine),
        TcpReceiver(receiver, SECRET, timeout=PATIENCE, handshake_timeout=PATIENCE) as impatient,
    ):
        sync(transport, 1)
        relay = Relay(impatient.address, kind, to_engine, place if to_engine else place % 1500, size)
        damaged = TcpTransport(*relay.address, SECRET, timeout=PATIENCE)
        started, failed = time.monotonic(), False
        try:
            sync(damaged, 2, timeout=PATIENCE)
        except SyncError:
            failed = True
        relay.close()
        assert time.monotonic() - started < 60
        until = time.monotonic() + 60
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
