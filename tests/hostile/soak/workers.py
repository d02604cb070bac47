"""The processes of the soak: an engine and a trainer that live through it, and pipes to them."""

import contextlib
import gc
import logging
import os
import pathlib
import resource
import threading
import traceback

import numpy as np

from jaxlowprec.weight_sync import (
    DeltaTransport,
    DirectoryTransport,
    Receiver,
    SharedMemoryReceiver,
    SharedMemoryTransport,
    SyncError,
    TcpReceiver,
    TcpTransport,
    WeightSource,
    pull,
    push,
)
from tests.hostile.soak import trainer_faults
from tests.weight_sync.killing_one_sync import FORK, forked, kill, weights_of
from tests.weight_sync.memory_use import status
from tests.weight_sync.syncing import SECRET, Engine

DISKS = ("directory", "delta")
KINDS = ("tcp", "shared", *DISKS)
SILENCE = 1.0
"""Seconds after which an engine gives a trainer up."""

PATIENCE = 30.0
"""Seconds after which a process that does not answer is a violation."""

BUCKET_BYTES = 400_000
ERRORS = (SyncError, OSError, MemoryError)
"""What a sync may raise. Anything else is a violation."""


class Violation(Exception):
    """A promise that was broken."""


class Worker:
    """A child process that answers requests with the methods of an object, until it is killed or this process ends."""

    alive: "list[Worker]" = []

    def __init__(self, made, *arguments):
        self._pipe, theirs = FORK.Pipe()
        self.alive.append(self)
        self.pid = forked(self._serve, theirs, made, arguments)
        theirs.close()

    def _serve(self, pipe, made, arguments):
        for worker in self.alive:
            worker._pipe.close()  # else it would not end when the parent does
        try:
            answering = made(*arguments)
            while True:
                verb, *given = pipe.recv()
                pipe.send(getattr(answering, verb)(*given))
        except EOFError:  # the parent has ended
            return
        except BaseException:
            traceback.print_exc()
            raise

    def tell(self, *request):
        """Sends a request; `answer` follows."""
        self._pipe.send(request)

    def answer(self):
        if not self._pipe.poll(PATIENCE):
            raise Violation(f"process {self.pid} has not answered for {PATIENCE} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise Violation(f"process {self.pid} ended by itself") from None

    def ask(self, *request):
        self.tell(*request)
        return self.answer()

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        kill(self.pid)
        os.waitpid(self.pid, 0)
        self._pipe.close()
        self.alive.remove(self)


def used():
    """Memory, descriptors and threads of this process."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208
    return {"memory": status("VmRSS"), "descriptors": descriptors, "threads": len(os.listdir("/proc/self/task"))}  # noqa: PTH208


class Limits:
    """Limits of this process, set for a while."""

    def __init__(self):
        self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.start = threading.Thread.start

    def limit(self, what, count):
        """Leaves `count` more descriptors, or lets the next `count` starts of threads fail. None: lifts the limit."""
        if what == "threads":
            trainer_faults.fail_threads(self.start, count or 0)
            return
        resource.setrlimit(resource.RLIMIT_NOFILE, self.before)
        if count is None:
            return
        free = os.dup(0)  # the first; there may be more between those that are open
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, self.before[1]))


class Errors(logging.Handler):
    """What a process logs as an error: none of the faults may cause one."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.said = []
        logging.getLogger("jaxlowprec").addHandler(self)
        logging.getLogger("jaxlowprec").propagate = False

    def emit(self, record):
        self.said.append(self.format(record))


class EngineProcess(Limits):
    """Serves a version of each kind, and pulls those of folders."""

    def __init__(self, folder):
        super().__init__()
        self._errors = Errors()
        self._folder = pathlib.Path(folder)
        self._engines = {kind: Engine() for kind in KINDS}
        self._receivers = {
            kind: Receiver(on_pause=engine.pause, on_resume=engine.resume) for kind, engine in self._engines.items()
        }
        self._tcp = TcpReceiver(self._receivers["tcp"], SECRET, timeout=SILENCE, handshake_timeout=SILENCE)
        self._shared = SharedMemoryReceiver(
            self._receivers["shared"], SECRET, self._folder / "socket", timeout=SILENCE, handshake_timeout=SILENCE
        )

    def port(self):
        return self._tcp.address[1]

    def pull(self, kind):
        """What pull says, as text, or the version."""
        try:
            return pull(self._folder / kind, self._receivers[kind])
        except ERRORS as error:
            return f"{type(error).__name__}: {error}"

    def report(self, kind):
        weights = self._receivers[kind].weights
        return {
            "version": weights.version,
            "whole": is_whole(weights),
            "serving": self._receivers[kind].state == "serving" and not self._engines[kind].paused,
            "listening": self._tcp._accepting.is_alive() and self._shared._accepting.is_alive(),
            "errors": self._errors.said,
        }

    def used(self):
        return used()


def is_whole(weights):
    """Whether weights are those of their version, to the byte."""
    expected = weights_of(weights.version) if weights.version else {}
    return set(weights) == set(expected) and all(np.array_equal(weights[name], expected[name]) for name in expected)


class TrainerProcess(Limits):
    """Pushes versions."""

    def __init__(self, folder, port):
        super().__init__()
        Errors()
        folder = pathlib.Path(folder)
        self._transports = {
            "tcp": TcpTransport("127.0.0.1", port, SECRET, timeout=60),
            "shared": SharedMemoryTransport(folder / "socket", SECRET),
            "directory": DirectoryTransport(folder / "directory", keep=2),
            "delta": DeltaTransport(folder / "delta", keep=2, full_every=4),
        }

    def push(self, kind, version, timeout, fault=None, *arguments):
        """Pushes a version under a fault of this process; None, or what it raised, as text."""
        transport = self._transports[kind]
        with getattr(trainer_faults, fault)(transport, *arguments) if fault else contextlib.nullcontext() as other:
            return pushed(other or transport, version, timeout)

    def push_to(self, port, version, timeout):
        """The same to another engine's port."""
        with contextlib.closing(TcpTransport("127.0.0.1", port, SECRET, timeout=60)) as transport:
            return pushed(transport, version, timeout)

    def used(self):
        return used()


def pushed(transport, version, timeout):
    try:
        push(WeightSource(weights_of(version)), transport, version=version, max_bytes=BUCKET_BYTES, timeout=timeout)
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"
    return None
