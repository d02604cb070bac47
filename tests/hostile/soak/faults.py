"""The faults: what happens to one sync. Each gives None where it got through, or else the trainer's error, as text."""

import os
import pathlib
import signal
import tempfile
import time

from jaxlowprec.weight_sync import Receiver, pull
from tests.hostile.soak.workers import DISKS, KINDS, PATIENCE, SILENCE, TrainerProcess, Violation
from tests.weight_sync.killing import Engine as VictimEngine
from tests.weight_sync.killing_one_sync import forked, kill, wait
from tests.weight_sync.relay import DAMAGE

ENDS = ("tcp", "shared")
TIMEOUT = 2 * SILENCE
PAYLOAD = 3 << 20  # bytes of a version, about
HEADERS = 6000  # and of all headers


def nothing(soak, kind, version):
    return soak.trainer.ask("push", kind, version, TIMEOUT)


def trainer_killed(soak, kind, version):
    """One of its own, in the middle of a push."""

    def push():
        os._exit(0 if TrainerProcess(soak.folder, soak.port).push(kind, version, TIMEOUT) is None else 3)

    child = forked(push)
    soak.moment(kind)
    kill(child)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFEXITED(status) and not os.WEXITSTATUS(status) else f"status {status}"


def engine_killed(soak, kind, version):
    """One of its own, while it receives: the trainer has an error in time, and goes on with the others."""
    with tempfile.TemporaryDirectory() as folder:
        victim = VictimEngine("tcp", pathlib.Path(folder))
        port, started = int(pathlib.Path(folder, "port").read_text()), time.monotonic()
        soak.trainer.tell("push_to", port, version, TIMEOUT)
        soak.moment(kind)
        victim.kill()
        soak.trainer.answer()
    if time.monotonic() - started > TIMEOUT + PATIENCE / 2:
        raise Violation("the trainer waited for a dead engine")
    return nothing(soak, kind, version)


def puller_killed(soak, kind, version):
    """One of its own, while it pulls the folder."""
    error = nothing(soak, kind, version)
    child = forked(lambda: pull(soak.folder / kind, Receiver()))
    soak.moment(kind)
    kill(child)
    wait(child)
    return error


def trainer_stopped(soak, kind, version):
    """In the middle of a push, over a connection for longer than it may be silent; then it goes on."""
    soak.trainer.tell("push", kind, version, TIMEOUT)
    soak.moment(kind)
    soak.trainer.signal(signal.SIGSTOP)
    time.sleep(1.3 * SILENCE if kind in ENDS else 0.02)
    if kind in ENDS:
        soak.resumed(kind)  # without the trainer
    soak.trainer.signal(signal.SIGCONT)
    return soak.trainer.answer()


def engine_stopped(soak, kind, version):
    """In the middle of a push, for longer than the trainer waits; then it goes on."""
    soak.trainer.tell("push", kind, version, TIMEOUT / 2)
    soak.moment(kind)
    soak.engine.signal(signal.SIGSTOP)
    error = soak.trainer.answer()
    soak.engine.signal(signal.SIGCONT)
    return error


def connection_cut(soak, kind, version):
    nbytes = soak.dice.randrange(HEADERS + PAYLOAD if kind == "tcp" else HEADERS)
    return soak.trainer.ask("push", kind, version, TIMEOUT, "cut", nbytes)


def bytes_damaged(soak, kind, version):
    to_engine = soak.dice.random() < 0.7
    how = soak.dice.choice(list(DAMAGE)), to_engine, soak.dice.randrange(PAYLOAD if to_engine else 2000)
    return soak.trainer.ask("push", kind, version, TIMEOUT, "damaged", *how, soak.dice.randint(1, 40))


def disk_full(soak, kind, version):
    fault = soak.dice.choice([("full", soak.dice.randrange(30)), ("small_files", soak.dice.randrange(PAYLOAD))])
    return soak.trainer.ask("push", kind, version, TIMEOUT, *fault)


def limited(who, what, most):
    """Fewer descriptors, or threads, for the engine or for the trainer than it may need."""

    def limit(soak, kind, version):
        worker = getattr(soak, who)
        worker.ask("limit", what, soak.dice.randrange(most[kind in DISKS]))
        error = nothing(soak, kind, version)
        if kind in DISKS:
            soak.engine.ask("pull", kind)  # whatever comes of it
        worker.ask("limit", what, None)
        return error

    return limit


FAULTS = {
    "nothing": (nothing, KINDS),
    "trainer killed": (trainer_killed, KINDS),
    "engine killed": (engine_killed, ("tcp",)),
    "puller killed": (puller_killed, DISKS),
    "trainer stopped": (trainer_stopped, KINDS),
    "engine stopped": (engine_stopped, ENDS),
    "connection cut": (connection_cut, ENDS),
    "bytes damaged": (bytes_damaged, ("tcp",)),
    "disk full": (disk_full, DISKS),
    "engine without descriptors": (limited("engine", "descriptors", (2, 6)), KINDS),
    "trainer without descriptors": (limited("trainer", "descriptors", (2, 8)), KINDS),
    "engine without threads": (limited("engine", "threads", (3, 3)), ENDS),
    "trainer without threads": (limited("trainer", "threads", (2, 2)), KINDS),
}
"""By their names: the function, and the kinds that it can happen to."""
