"""Two and four processes of one trainer, started as jax.distributed starts them; the engine is this process."""

import contextlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxlowprec.weight_sync import Receiver, ShardedReceiver, SharedMemoryReceiver, TcpReceiver, pull
from tests.helpers import python_environment
from tests.ports import free_port
from tests.weight_sync.sharded.trainer import expected
from tests.weight_sync.syncing import SECRET

LONGEST = 600  # seconds; a machine that is slow or busy takes a part of them

pytestmark = pytest.mark.slow


class Trainer:
    """The trainer's processes."""

    def __init__(self, folder, kind, addresses, versions=0, first=1):
        at, self.logs, self.running = f"127.0.0.1:{free_port()}", [], []
        for process, address in enumerate(addresses):
            self.logs.append(folder / f"log-{process}.txt")
            arguments = map(str, [at, len(addresses), process, kind, versions, first, address])
            with self.logs[-1].open("w") as log:
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.weight_sync.sharded.trainer", *arguments],
                        env=python_environment(JAX_COORDINATOR_BIND_ADDRESS=at, JAX_NUM_CPU_DEVICES="2", XLA_FLAGS=""),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self):
        try:
            return [process.wait(LONGEST) for process in self.running]
        finally:
            self.kill()

    def kill(self):
        for process in self.running:
            process.kill()
            process.wait()

    def output(self):
        return "".join(log.read_text(errors="replace")[-2000:] for log in self.logs)


@contextlib.contextmanager
def listening(kind, folder, processes):
    """The joined receiver and the addresses of its parts."""
    joined = ShardedReceiver(Receiver(), processes)
    with contextlib.ExitStack() as opened:
        addresses = []
        for process, part in enumerate(joined.parts):
            if kind == "tcp":
                addresses.append(opened.enter_context(TcpReceiver(part, SECRET)).address[1])
            elif kind == "shared":
                addresses.append(folder / f"part-{process}")
                opened.enter_context(SharedMemoryReceiver(part, SECRET, addresses[-1]))
            else:
                addresses.append(folder / f"part-{process}")
        yield joined, addresses


def assert_whole(weights):
    wanted = expected(weights.version)
    assert set(weights) == set(wanted)
    for name, array in wanted.items():
        assert weights[name].dtype == array.dtype and np.array_equal(weights[name], array), (name, weights.version)


@pytest.mark.parametrize(
    ("processes", "kind"),
    [(2, "tcp"), (4, "tcp"), (2, "shared"), (2, "directory"), pytest.param(4, "shared", marks=pytest.mark.every_case)],
)
def test_versions_of_several_processes_are_those_of_one(processes, kind, tmp_path):
    with listening(kind, tmp_path, processes) as (joined, addresses):
        trainer = Trainer(tmp_path, kind, addresses, versions=3)
        assert trainer.wait() == [0] * processes, trainer.output()
        for address, part in zip(addresses, joined.parts, strict=True):
            if kind == "directory":
                assert joined.receiver.version == 0
                pull(address, part)
        assert joined.receiver.version == 3
        assert_whole(joined.receiver.weights)


@pytest.mark.parametrize(("kind", "kills"), [("tcp", 2), ("shared", 1)])
def test_a_killed_process_leaves_the_last_whole_version(kind, kills, tmp_path):
    chosen = random.Random(25)
    with listening(kind, tmp_path, 2) as (joined, addresses):
        for _ in range(kills):
            before = joined.receiver.version
            trainer = Trainer(tmp_path, kind, addresses, first=1 + max(part.version for part in joined.parts))
            try:
                until = time.monotonic() + LONGEST
                while joined.receiver.version < before + 2:
                    assert time.monotonic() < until and trainer.running[0].poll() is None, trainer.output()
                    time.sleep(0.005)
                time.sleep(chosen.uniform(0, 0.2))
                trainer.running[chosen.randrange(2)].send_signal(signal.SIGKILL)
                assert 0 not in trainer.wait()  # the other one does not go on alone
            finally:
                trainer.kill()
            assert joined.receiver.state == "serving" and joined.receiver.version >= before + 2
            assert_whole(joined.receiver.weights)


def test_all_processes_learn_that_one_failed(tmp_path):
    with listening("tcp", tmp_path, 2) as (joined, addresses):
        trainer = Trainer(tmp_path, "tcp", [addresses[0], free_port()])
        assert 0 not in trainer.wait()
        assert "SyncError: push_shards: process 1 of 2 could not prepare" in trainer.logs[0].read_text()
        assert "Connection refused; needs a TcpReceiver" in trainer.logs[1].read_text()
        assert joined.receiver.version == joined.parts[0].version == 0


def test_many_receivers_of_which_a_process_does_not_reach_one(tmp_path):
    with listening("tcp", tmp_path, 2) as (a, of_a), listening("tcp", tmp_path, 2) as (b, of_b):
        of_b[1] = free_port()  # nobody listens there
        with listening("tcp", tmp_path, 2) as (c, of_c):
            addresses = [f"a={of_a[p]},b={of_b[p]},c={of_c[p]}" for p in (0, 1)]
            trainer = Trainer(tmp_path, "fan_out", addresses, versions=3)
            assert trainer.wait() == [0, 0], trainer.output()
    for receiver, version in ((a, 3), (b, 0), (c, 3)):
        assert receiver.receiver.version == version
    assert_whole(a.receiver.weights)
    assert_whole(c.receiver.weights)
    for log in trainer.logs:
        first, *others = [line for line in log.read_text().splitlines() if line[:1] in "123"]
        assert first.startswith("1 a c [('b', ") and first.endswith("('a', 'c')")
        assert others == ["2 a c [] ('a', 'c')", "3 a c [] ('a', 'c')"]
    assert "process 1 of 2 could not send its part" in trainer.logs[0].read_text()


def test_processes_with_other_receivers_send_nothing(tmp_path):
    with listening("tcp", tmp_path, 2) as (joined, addresses):
        trainer = Trainer(tmp_path, "fan_out", [f"{name}={port}" for name, port in zip("ab", addresses, strict=True)])
        assert 0 not in trainer.wait()
        for log in trainer.logs:
            assert "make a FanOut of the same names in all processes" in log.read_text()
        assert joined.parts[0].version == 0 and joined.parts[0].state == "serving"
