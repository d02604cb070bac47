"""Deadlines are of silence: a peer that falls silent is given up in time, one that is slow and steady is not."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from jaxlowprec.weight_sync.transports.protocol import Kind, write, write_begin, write_commit
from jaxlowprec.weight_sync.transports.security import ClientTls
from jaxlowprec.weight_sync.transports.sockets import Deadline
from jaxlowprec.weight_sync.transports.tcp import TcpTransport
from tests.weight_sync.syncing import SECRET, connected, is_whole, model, over_tcp, packed, sync

TIMEOUT = 0.6
STEADY, PAUSE = 1.5, 0.25  # a machine may keep a thread from its pieces for the difference
MIB = 1 << 20


class Pieces:
    """A connection that sends what it is given in pieces, with a pause before each; or only a part of it."""

    def __init__(self, connection, nbytes, pause, most=None):
        self._connection, self._nbytes, self._pause, self._left = connection, nbytes, pause, most

    def settimeout(self, seconds):
        self._connection.settimeout(60)

    def sendmsg(self, buffers):
        whole = b"".join(buffers)
        for begin in range(0, len(whole) if self._left is None else self._left, self._nbytes):
            time.sleep(self._pause)
            self._connection.sendall(whole[begin : begin + self._nbytes])
        return len(whole)


def ask(channel, kind, header, payload=(), through=None):
    """Sends a frame, through something else if given; the answer's kind."""
    connection = channel.connection
    channel.connection = connection if through is None else through
    channel.send(kind, header, payload, deadline=Deadline(60, "room"))
    channel.connection = connection
    return channel.receive(Deadline(60, "answer")).kind


@pytest.mark.parametrize("refused", [False, True], ids=["a bucket", "a refused bucket"])
def test_a_trainer_silent_inside_a_bucket_is_given_up_in_time(refused):
    arrays = {"a": np.zeros(20 * MIB, np.uint8)}
    with over_tcp(timeout=TIMEOUT) as (receiver, listening, transport, engine):
        sync(transport, 1)
        manifest, (bucket,) = packed(arrays, 2, buckets=1)
        channel = connected(listening)
        assert ask(channel, Kind.PAUSE, write(timeout=1)) is Kind.DONE
        if not refused:
            assert ask(channel, Kind.BEGIN, write_begin(2, manifest)) is Kind.DONE
        half = Pieces(channel.connection, MIB, 0, most=10 * MIB)
        connection, channel.connection = channel.connection, half
        started = time.monotonic()
        channel.send(Kind.BUCKET, bucket.header.to_json(), [bucket.payload], deadline=Deadline(60, "room"))
        assert engine.resumed.wait(60)
        assert time.monotonic() - started >= TIMEOUT
        assert receiver.state == "serving" and is_whole(receiver.weights, 1)
        connection.close()
        sync(transport, 2)
        assert is_whole(receiver.weights, 2)


def test_a_trainer_that_is_slow_and_steady_is_not_given_up():
    arrays = {f"a tensor with a name, number {i}": np.full(50, i, np.int32) for i in range(40)}
    with over_tcp(timeout=STEADY) as (receiver, listening, _, engine):
        manifest, (bucket,) = packed(arrays, 1, buckets=1)
        channel = connected(listening)
        assert ask(channel, Kind.PAUSE, write(timeout=1)) is Kind.DONE
        whole = bucket.header.to_json(), [bucket.payload]
        for kind, header, payload in ((Kind.BEGIN, write_begin(1, manifest), []), (Kind.BUCKET, *whole)):
            nbytes = len(header) + sum(array.nbytes for array in payload)
            started = time.monotonic()
            assert (
                ask(channel, kind, header, payload, through=Pieces(channel.connection, nbytes // 7, PAUSE)) is Kind.DONE
            )
            assert time.monotonic() - started > STEADY
        assert ask(channel, Kind.COMMIT, write_commit(1, manifest.hash)) is Kind.DONE
        assert ask(channel, Kind.RESUME, b"") is Kind.DONE
        assert receiver.version == 1 and engine.paused == 0
        channel.close()


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of TLS, of a record of 512


@pytest.mark.parametrize("within_tls", [False, True])
def test_a_stranger_that_drips_bytes_is_dropped(within_tls):
    """Silence is for those who have proved the secret: of a stranger all has to come within the time."""
    with over_tcp(handshake_timeout=TIMEOUT) as (receiver, listening, _, _):
        started = time.monotonic()  # before the receiver can accept
        stranger = socket.create_connection(listening.address)
        if within_tls:
            stranger, _ = ClientTls(None).connect(stranger, "127.0.0.1", Deadline(60, "TLS"))
        with stranger:
            stranger.sendall(b"JLPSYNC" if within_tls else HELLO)
            ended = threading.Event()

            def drip():
                try:
                    while not ended.wait(TIMEOUT / 8):
                        stranger.sendall(b"\3")
                except OSError:
                    pass

            thread = threading.Thread(target=drip)
            thread.start()
            stranger.settimeout(60)
            challenge = 40 if within_tls else 0
            with contextlib.suppress(ConnectionResetError):
                assert len(stranger.recv(1000)) == challenge
                assert stranger.recv(1000) == b""
            assert time.monotonic() - started >= TIMEOUT
            ended.set()
            thread.join()
        sync(TcpTransport(*listening.address, SECRET, timeout=60), 1, model(1))
        assert is_whole(receiver.weights, 1)
