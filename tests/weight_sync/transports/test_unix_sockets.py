"""One path, one receiver: a socket that a process has is not taken from it, one that nobody has is replaced."""

import concurrent.futures
import contextlib
import os
import pathlib
import socket
import stat
import threading

import pytest

from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports import sockets
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from jaxlowprec.weight_sync.transports.sockets import listen_at
from tests.weight_sync.syncing import SECRET, is_whole, sync

linux = pytest.mark.skipif(not pathlib.Path("/proc/net/unix").exists(), reason="asks the system who has bound a socket")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "socket"


def bound(path):
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


@linux
@pytest.mark.parametrize("relative", [False, True])
def test_a_socket_bound_but_not_listening_is_not_stolen(path, monkeypatch, relative):
    monkeypatch.chdir(path.parent)
    with bound(path) as starting:
        with pytest.raises(OSError, match="in use"):
            SharedMemoryReceiver(Receiver(), SECRET, path.name if relative else path)
        starting.listen(1)
        with socket.socket(socket.AF_UNIX) as trainer:
            trainer.connect(str(path))  # it still has its name


def test_of_receivers_at_a_dead_ones_path_one_has_it(path):
    bound(path).close()
    for _ in range(20):
        start = threading.Barrier(6)

        def begun(start=start):
            start.wait()
            with contextlib.suppress(OSError):
                return listen_at(path, 32)  # what the others looked with waits there too

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            made = [future.result() for future in [pool.submit(begun) for _ in range(6)]]
        (listener,) = [one for one in made if one is not None]
        with socket.socket(socket.AF_UNIX) as trainer:
            trainer.settimeout(60)
            trainer.connect(str(path))
            trainer.sendall(b"x")
            listener.settimeout(60)
            while True:
                with listener.accept()[0] as connection:
                    if connection.recv(1) == b"x":
                        break
        listener.close()


def test_the_name_is_its_owners_alone_from_its_first_moment_on(path, monkeypatch):
    modes, bind = [], socket.socket.bind

    class Watched(socket.socket):
        def bind(self, address):
            bind(self, address)
            modes.append(stat.S_IMODE(path.lstat().st_mode))

    monkeypatch.setattr(sockets.socket, "socket", Watched)
    before = os.umask(0)
    try:
        listen_at(path, 1).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert modes == [0o600] or not sockets._BOUND.exists()  # Linux


def test_a_link_at_the_path_is_no_way_to_another_file(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o644)
    path.symlink_to(victim)
    with pytest.raises(OSError, match="in use"):
        SharedMemoryReceiver(Receiver(), SECRET, path)
    assert victim.read_text() == "mine" and stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_a_receiver_takes_no_name_with_it_that_is_anothers(path):
    receiver = Receiver()
    first = SharedMemoryReceiver(Receiver(), SECRET, path)
    path.unlink()  # somebody cleans up
    with SharedMemoryReceiver(receiver, SECRET, path):
        first.close()
        with contextlib.closing(SharedMemoryTransport(path, SECRET)) as transport:
            sync(transport, 1)
        assert is_whole(receiver.weights, 1)
    assert not path.exists()


def test_a_folder_locked_for_good_is_a_clear_error(path, monkeypatch):
    monkeypatch.setattr(sockets, "_PATIENCE", 0.05)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        assert sockets.locked(descriptor, 1.0)
        with pytest.raises(OSError, match="somebody has had the folder locked for 0.05 s"):
            SharedMemoryReceiver(Receiver(), SECRET, path)
    finally:
        os.close(descriptor)
    SharedMemoryReceiver(Receiver(), SECRET, path).close()


def test_a_file_system_without_locks_will_do(path, monkeypatch):
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(sockets, "locked", none)
    SharedMemoryReceiver(Receiver(), SECRET, path).close()
