"""Kills one side of one sync at a random moment: on disks, and the receiver over TCP. See test_kill_one_sync.

    python -m tests.weight_sync.killing_one_sync CASE KILLS SEED

A process of its own, with one thread and no JAX backend, from which everything else is forked. Prints a JSON object:
the number of kills that found the sync unfinished, and of those after which each version was served. Any violation is
an exception. Killed are only processes that it has forked itself.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

import numpy as np

from jaxlowprec.weight_sync.errors import SyncError
from jaxlowprec.weight_sync.folders.delta import DeltaTransport
from jaxlowprec.weight_sync.folders.directory import DirectoryTransport
from jaxlowprec.weight_sync.folders.pulling import pull
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from tests.weight_sync.syncing import SECRET, Engine, sync

TIMEOUT = 60.0
BUCKETS = 6
FORK = multiprocessing.get_context("fork")


def weights_of(version):
    """3 MiB in twelve tensors, of which some change in few places only."""
    weights = {f"layer.{i}": np.full(65536, version if i % 3 else 7, np.int32) for i in range(12)}
    for i in range(0, 12, 3):
        weights[f"layer.{i}"][version % 1000 :: 4096] = version
    return weights


def check_whole(weights, version):
    expected = weights_of(version) if version else {}
    if set(weights) != set(expected) or any(weights[name].tobytes() != expected[name].tobytes() for name in expected):
        raise AssertionError(f"version {version} is served, and is not whole")


def forked(action, *arguments):
    """A child that runs an action and ends, without the parent's clean-up; its process id."""
    child = os.fork()
    if not child:
        code = 1
        try:
            action(*arguments)
            code = 0
        except SyncError:
            code = 2  # the other side was killed
        finally:
            os._exit(code)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)


def wait(child):
    """Whether it was killed, of a child that either was or ended well."""
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise AssertionError(f"a child ended with {os.WEXITSTATUS(status)}")
    return False


def kill_later(child, delay):
    """Kills a child of this process after some seconds, from a process of its own; the killer's id."""

    def action():
        time.sleep(delay)
        kill(child)

    return forked(action)


class ReceiverProcess:
    """A receiver that listens in a child process and says on request what it serves."""

    def __init__(self):
        self._pipe, theirs = FORK.Pipe()
        self.child = forked(self._serve, theirs)
        theirs.close()
        self.port = self._pipe.recv()

    @staticmethod
    def _serve(pipe):
        engine = Engine()
        receiver = Receiver(on_pause=engine.pause, on_resume=engine.resume)
        with TcpReceiver(receiver, SECRET, timeout=TIMEOUT) as listening:
            pipe.send(listening.address[1])
            while pipe.recv():
                until = time.monotonic() + TIMEOUT
                while receiver.state != "serving" or engine.paused:
                    if time.monotonic() > until:
                        raise AssertionError("the engine was not resumed")
                    time.sleep(0.0005)
                weights = receiver.weights
                check_whole(weights, weights.version)
                pipe.send(weights.version)

    def version(self):
        """That is served, whole, by an engine that goes on."""
        self._pipe.send(True)
        if not self._pipe.poll(2 * TIMEOUT):
            raise AssertionError("the receiver does not answer")
        return self._pipe.recv()

    def killed(self):
        """Whether it was killed; gives back what this process held of it."""
        self._pipe.close()
        return wait(self.child)

    def transport(self):
        return TcpTransport("127.0.0.1", self.port, SECRET, timeout=60)

    def end(self):
        self._pipe.send(False)
        wait(self.child)


def push(transport, version):
    sync(transport, version, weights_of(version), TIMEOUT, BUCKETS)


def timed_once(action, *arguments):
    started = time.perf_counter()
    wait(forked(action, *arguments))
    return time.perf_counter() - started


def tcp_receiver(kills, dice):
    """Receivers are killed: the trainer gets an error in time, and a new receiver, empty, gets to a whole version."""
    outcomes = {"errors": 0, "in time": 0}
    receiver = ReceiverProcess()
    seconds = []
    for version in (1, 2, 3):
        started = time.perf_counter()
        push(receiver.transport(), version)
        seconds.append(time.perf_counter() - started)
    for _ in range(kills):
        killer = kill_later(receiver.child, dice.uniform(0, 1.1 * sorted(seconds)[1]))
        version += 1
        started = time.monotonic()
        try:
            push(receiver.transport(), version)
        except SyncError:
            outcomes["errors"] += 1
        outcomes["in time"] += time.monotonic() - started < TIMEOUT
        wait(killer)
        if not receiver.killed():
            raise AssertionError("the receiver ended by itself")
        receiver = ReceiverProcess()
        if receiver.version() != 0:
            raise AssertionError("a new receiver serves something")
        version += 1
        push(receiver.transport(), version)
        if receiver.version() != version:
            raise AssertionError("the new receiver did not get the version")
    receiver.end()
    return outcomes


def publish(path, kind, first, count):
    transport = kind(path, keep=2)
    for version in range(first, first + count):
        push(transport, version)


def disk_trainer(kills, dice, kind):
    """Trainers are killed while they write versions: a receiver pulls a whole one, and the next trainer publishes."""
    outcomes, receiver = {"unfinished": 0, "old": 0, "new": 0}, Receiver()
    with tempfile.TemporaryDirectory() as path:
        version = 1
        seconds = []
        for _ in range(3):
            seconds.append(timed_once(publish, path, kind, version, 3))
            version += 3
        version -= 1
        for _ in range(kills):
            child = forked(publish, path, kind, version + 1, 3)
            time.sleep(dice.uniform(0, 1.1 * sorted(seconds)[1]))
            kill(child)
            outcomes["unfinished"] += wait(child)
            served = pull(path, receiver)
            if not version <= served <= version + 3:
                raise AssertionError(f"version {served} is served; it was {version}")
            check_whole(receiver.weights, served)
            outcomes["new" if served > version else "old"] += 1
            version = served + 1
            publish(path, kind, version, 1)
            if pull(path, receiver) != version:
                raise AssertionError("the next version did not get through")
            check_whole(receiver.weights, version)
            left = [entry.name for entry in pathlib.Path(path).iterdir() if "writing" in entry.name]
            if left:
                raise AssertionError(f"{left} were left behind")
    return outcomes


def disk_receiver(kills, dice):
    """Receivers are killed while they pull a complete version and deltas: a new one gets to the newest, whole."""
    outcomes = {"unfinished": 0}
    with tempfile.TemporaryDirectory() as path:
        publish(path, DeltaTransport, 1, 4)

        def engine():
            receiver = Receiver()
            if pull(path, receiver) != 4:
                raise AssertionError("not the newest version")
            check_whole(receiver.weights, 4)

        seconds = [timed_once(engine) for _ in range(3)]
        for _ in range(kills):
            child = forked(engine)
            time.sleep(dice.uniform(0, 1.1 * sorted(seconds)[1]))
            kill(child)
            outcomes["unfinished"] += wait(child)
        engine()
        publish(path, DeltaTransport, 5, 3)  # nobody holds a lock
    return outcomes


CASES = {
    "tcp_receiver": tcp_receiver,
    "directory_trainer": lambda kills, dice: disk_trainer(kills, dice, DirectoryTransport),
    "delta_trainer": lambda kills, dice: disk_trainer(kills, dice, DeltaTransport),
    "disk_receiver": disk_receiver,
}


if __name__ == "__main__":
    signal.alarm(900)  # nothing here may hang for ever
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(CASES[sys.argv[1]](int(sys.argv[2]), random.Random(int(sys.argv[3])))))
