"""train_lm.py in several processes of this machine, over loopback."""

import json
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from tests.helpers import FAST_COMPILATION, python_environment

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"
XLA_FLAGS = " ".join(FAST_COMPILATION)  # most of a run's time; the same for all that are compared
STEPS, EVERY, HEARTBEAT, LONGEST = 24, 8, 10, 240  # the last two in seconds


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

    @property
    def checkpoints(self):
        return self.out / self.recipe.replace(":", "-") / "checkpoints"

    def saved(self):
        """The steps whose checkpoints are whole."""
        return [int(folder.name) for folder in self.checkpoints.glob("*") if folder.name.isdecimal()]

    def wait_for(self, pattern):
        """Until there is a checkpoint of such a name."""
        end = time.monotonic() + LONGEST
        while not list(self.checkpoints.glob(pattern)):
            if time.monotonic() > end or any(p.poll() is not None for p in self.running):
                self.kill()
                pytest.fail(f"no checkpoint {pattern}: {self.output(0)[-2000:]}")
            time.sleep(0.01)

    def signal(self, number, *which):
        """Sends a signal to some, or to all."""
        for i in which or range(len(self.running)):
            self.running[i].send_signal(number)

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
