"""examples/train_lm.py in several processes: the bits of one process, and what happens when one of them is gone.

All on this machine's loopback. A mesh of two devices along an axis: a sum of two is the same in either order, whether
XLA adds within a process or gloo between processes. Longer sums meet in other orders.
"""

import functools
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import train_lm

from tests.helpers import FAST_COMPILATION, python_environment, refused

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"
XLA_FLAGS = " ".join(FAST_COMPILATION)  # most of a run's time; the same for all that are compared
STEPS, EVERY, HEARTBEAT, LONGEST = 24, 8, 10, 240  # the last two in seconds


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("".join(f"{n * n % 7919} low bits of a block\n" for n in range(4000)))
    return file


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes:
    """train_lm.py in `count` processes, and what they print."""

    def __init__(self, text, out, count, mesh, *more, recipe="nvfp4"):
        options = ["--text", text, "--out", out, "--mesh", mesh, "--size", "tiny", "--batch", 8, "--recipe", recipe]
        options += ["--steps", STEPS, "--checkpoint-every", EVERY, *more]
        at, self.out, self.running, self.logs = f"127.0.0.1:{free_port()}", out, [], []
        self.recipe = recipe
        out.mkdir(exist_ok=True)
        for i in range(count):
            joining = ["--coordinator", at, "--processes", count, "--process", i, "--heartbeat-timeout", HEARTBEAT]
            self.logs.append(out / f"output-{i}-of-{count}.txt")
            with self.logs[i].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *map(str, [SCRIPT, *options, *(joining if count > 1 else [])])],
                    env=python_environment(JAX_COORDINATOR_BIND_ADDRESS=at, XLA_FLAGS=XLA_FLAGS),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.running.append(process)

    def wait(self, *which, seconds=LONGEST):
        """The exit codes of some, or of all; none is left running when they take too long."""
        end = time.monotonic() + seconds
        try:
            return [self.running[i].wait(max(0.0, end - time.monotonic())) for i in which or range(len(self.running))]
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not ended after {seconds} s: {self.output(0)[-2000:]}")

    def wait_for_checkpoint(self, step):
        end = time.monotonic() + LONGEST
        while not (self.out / self.recipe / "checkpoints" / str(step)).exists():
            if time.monotonic() > end or any(p.poll() is not None for p in self.running):
                self.kill()
                pytest.fail(f"no checkpoint of step {step}: {self.output(0)[-2000:]}")
            time.sleep(0.01)

    def kill(self):
        for process in self.running:
            process.kill()
            process.wait()

    def output(self, i):
        return self.logs[i].read_text(errors="replace")

    def report(self):
        """The only run of the report."""
        assert self.wait() == [0] * len(self.running), self.output(0)[-2000:]
        return json.loads((self.out / "report.json").read_text())["runs"][0]


@pytest.fixture(scope="module")
def in_one_process(text, tmp_path_factory):
    """The undisturbed run on a mesh, in one process."""
    return functools.cache(lambda mesh: Processes(text, tmp_path_factory.mktemp("one"), 1, mesh).report())


def assert_same_run(run, expected):
    assert run["losses"] == expected["losses"] and len(run["losses"]) == STEPS
    assert run["validation_loss"] == expected["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, "data=2"), (2, "fsdp=2,tensor=2")])
def test_the_losses_are_those_of_one_process_bit_for_bit(text, in_one_process, tmp_path, count, mesh):
    processes = Processes(text, tmp_path, count, mesh)
    assert_same_run(processes.report(), in_one_process(mesh))
    assert "report:" in processes.output(0)
    for i in range(1, count):  # the first process speaks for all
        # Threads may write gloo's message at once, and tear it.
        said = [line for line in processes.output(i).splitlines() if not re.search("Gloo|connected peer ranks", line)]
        assert said == []


def kill_one(processes, victim):
    """Kills one of two after the first checkpoint. The other ends at once, its connections broken, and says why."""
    processes.wait_for_checkpoint(EVERY)
    processes.running[victim].kill()
    survivor = 1 - victim
    assert processes.wait(survivor, seconds=3 * HEARTBEAT)[0] != 0, "it ended before the other could be killed"
    said = processes.output(survivor)
    assert "another process most likely died" in said or "another task died" in said
    assert not (processes.out / "report.json").exists()


@pytest.mark.slow
def test_a_killed_coordinator_ends_the_others(text, tmp_path):
    kill_one(Processes(text, tmp_path, 2, "data=2", "--steps", 4000, recipe="bf16"), victim=0)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_resumes(text, in_one_process, tmp_path):
    kill_one(Processes(text, tmp_path, 2, "data=2"), victim=1)
    log = tmp_path / "nvfp4" / "losses.json"
    log.write_text(json.dumps([-1.0, *json.loads(log.read_text())[1:]]))  # a mark: a run from the start would lose it
    run = Processes(text, tmp_path, 2, "data=2", "--resume").report()
    assert run["losses"][0] == -1.0
    expected = in_one_process("data=2")
    assert_same_run(run | {"losses": [expected["losses"][0], *run["losses"][1:]]}, expected)


@pytest.mark.slow
def test_a_process_that_hangs_is_found_by_its_heartbeat(text, tmp_path):
    processes = Processes(text, tmp_path, 2, "data=2", "--steps", 4000, recipe="bf16")
    processes.wait_for_checkpoint(EVERY)
    processes.running[1].send_signal(signal.SIGSTOP)
    code = processes.wait(0, seconds=4 * HEARTBEAT)[0]
    processes.kill()
    assert code != 0
    _, _, named = processes.output(0).partition("unhealthy (stopped sending heartbeats):\n")
    assert named.startswith(("1\n", "/job:jax_worker/replica:0/task:1"))  # as JAX of this and of other versions says it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--processes", "2"), "--coordinator, --processes and --process go together"),
        (("--coordinator", "a:1", "--processes", "2", "--process", "2"), "--process 2: needs 0 to 1"),
        (("--coordinator", "a:1", "--processes", "2", "--process", "0"), "several processes need --mesh"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, refused_by, arguments, message):
    assert message in refused_by(train_lm.main, "--out", tmp_path, *arguments)


def test_a_cluster_that_jax_does_not_detect_is_named(tmp_path):
    message = "where JAX detects no cluster, give --coordinator"
    assert message in refused(str(SCRIPT), "--out", str(tmp_path), "--distributed", "--mesh", "data=2")
