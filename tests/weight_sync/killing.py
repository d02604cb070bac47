"""Kills a trainer or an engine at random moments of a sync, again and again. Run as a program; see test_kills.

    python -m tests.weight_sync.killing tcp|shared KILLS FOLDER

This process has one thread and no connection, so that it may fork. It prints what it saw of each, as JSON.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import time

import numpy as np

from jaxlowprec.weight_sync import Receiver, SyncError, WeightSource, push
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport

SECRET = b"a secret of the tests, of 32 B .."
SIZE, ARRAYS = 30_000, 6
PATIENCE = 60.0


def tree(version):
    return {f"m{i}": {"w": np.full(SIZE, version, np.int32)} for i in range(ARRAYS)}


def report(receiver):
    weights = receiver.weights
    whole = not weights.version or (
        len(weights) == ARRAYS and all((array == weights.version).all() for array in weights.values())
    )
    return {
        "version": weights.version,
        "whole": bool(whole),
        "state": receiver.state,
        "descriptors": len(list(pathlib.Path("/proc/self/fd").iterdir())),
    }


def forked(work, *arguments):
    """A child that does some work and never comes back from it."""
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    return child


def engine(kind, folder, commands, answers):
    """Serves until it is killed, and answers each byte of `commands` with a line."""
    receiver = Receiver()
    if kind == "tcp":
        listening = TcpReceiver(receiver, SECRET, timeout=PATIENCE)
        (folder / "new").write_text(str(listening.address[1]))
        (folder / "new").replace(folder / "port")
    else:
        SharedMemoryReceiver(receiver, SECRET, folder / "engine", timeout=PATIENCE)
    os.write(answers, b"ready\n")
    while os.read(commands, 1):
        os.write(answers, json.dumps(report(receiver)).encode() + b"\n")


class Paced:
    """A transport whose trainer is within a version for most of its time, however busy the machine is."""

    def send(self, bucket, timeout):
        super().send(bucket, timeout)
        time.sleep(0.005)


class OverTcp(Paced, TcpTransport):
    pass


class OverSharedMemory(Paced, SharedMemoryTransport):
    pass


def trainer(kind, folder):
    """Pushes one version after the other until it is killed; waits for an engine that is not there."""
    while True:
        with contextlib.suppress(SyncError, OSError, ValueError):
            port = int((folder / "port").read_text()) if kind == "tcp" else 0
            transport = (
                OverTcp("127.0.0.1", port, SECRET) if kind == "tcp" else OverSharedMemory(folder / "engine", SECRET)
            )
            with contextlib.closing(transport):
                while True:
                    version = transport.version(PATIENCE) + 1
                    push(WeightSource(tree(version)), transport, version=version, max_bytes=4 * SIZE, timeout=PATIENCE)
        time.sleep(0.002)


class Engine:
    """An engine's process, and the pipes to it."""

    def __init__(self, kind, folder):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self.child = forked(engine, kind, folder, commands, answers)
        os.close(commands)
        os.close(answers)
        assert self._line() == "ready"

    def ask(self):
        os.write(self._commands, b"?")
        return json.loads(self._line())

    def _line(self):
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self._answers, 4096)
            if not piece:
                raise RuntimeError("the engine died")
            line += piece
        return line.decode().strip()

    def kill(self):
        kill(self.child)
        os.close(self._commands)
        os.close(self._answers)


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def until(engine, condition):
    """What the engine says once a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition(said := engine.ask()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine said {said} for {PATIENCE} s")
        time.sleep(0.001)
    return said


def killed(kind, victim, kills, folder):
    """What was seen while trainers, or engines, were killed."""
    random.seed(7)
    folder.mkdir()
    serving, training = Engine(kind, folder), forked(trainer, kind, folder)
    torn, states, versions, descriptors = 0, {}, [], []
    for kill_number in range(kills):
        until(serving, lambda said: said["version"] > 0)
        if kill_number % 2:  # within a version, if nothing else comes between
            until(serving, lambda said: said["state"] == "receiving")
        time.sleep(random.uniform(0, 0.02))
        if victim == "trainer":
            os.kill(training, signal.SIGSTOP)  # to see where it was
            os.waitpid(training, os.WUNTRACED)
            said = serving.ask()
            kill(training)
            states[said["state"]] = states.get(said["state"], 0) + 1
            torn += not said["whole"]
            said = until(serving, lambda said: said["state"] == "serving")
            torn += not said["whole"]
            versions.append(said["version"])
            descriptors.append(said["descriptors"])
            training = forked(trainer, kind, folder)
            until(serving, lambda now, said=said: now["version"] > said["version"])
        else:
            said = serving.ask()
            states[said["state"]] = states.get(said["state"], 0) + 1
            torn += not said["whole"]
            serving.kill()
            serving = Engine(kind, folder)
            said = until(serving, lambda said: said["version"] > 0)
            torn += not said["whole"]
            versions.append(said["version"])
            descriptors.append(len(list(pathlib.Path(f"/proc/{training}/fd").iterdir())))
    kill(training)
    serving.kill()
    return {"torn": torn, "states": states, "versions": versions, "descriptors": descriptors}


if __name__ == "__main__":
    kind, kills, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    print(json.dumps({victim: killed(kind, victim, kills, folder / victim) for victim in ("trainer", "engine")}))
