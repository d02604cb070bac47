"""train_lm.py in several processes of this machine, over loopback."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.helpers import FAST_COMPILATION, python_environment
from tests.ports import free_port

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"
PROGRAM = pathlib.Path(__file__).parent / "program.py"
XLA_FLAGS = " ".join(FAST_COMPILATION)  # most of a run's time; the same for all that are compared
STEPS, EVERY = 12, 4
HEARTBEAT, LONGEST = 100, 600  # seconds; a machine that is slow or busy takes a part of them


class Processes:
    """train_lm.py in `count` processes, and what they print.

    Arguments:
        more: further options.
        wait_before: a step before which all wait until `proceed`.
        dying: the numbers of processes that kill themselves while they save their first checkpoint.
        heartbeat: seconds after which a silent process counts as dead.
    """

    def __init__(self, text, out, count, mesh, *more, recipe="nvfp4", wait_before=None, dying=(), heartbeat=HEARTBEAT):
        options = ["--text", text, "--out", out, "--mesh", mesh, "--size", "tiny", "--batch", 8, "--recipe", recipe]
        options += ["--steps", STEPS, "--checkpoint-every", EVERY, *more]
        at, self.out, self.running, self.logs = f"127.0.0.1:{free_port()}", out, [], []
        self.recipe = recipe
        out.mkdir(exist_ok=True)
        self._go = out / "go"
        self._go.unlink(missing_ok=True)
        path = os.pathsep.join([str(SCRIPT.parent), python_environment()["PYTHONPATH"]])
        for i in range(count):
            variables = {"JAX_COORDINATOR_BIND_ADDRESS": at, "XLA_FLAGS": XLA_FLAGS, "PYTHONPATH": path}
            if wait_before is not None:
                variables |= {"WAIT_BEFORE": str(wait_before), "GO": str(self._go)}
            if i in dying:
                variables["DIE_WHILE_SAVING"] = str(EVERY)
            joining = ["--coordinator", at, "--processes", count, "--process", i, "--heartbeat-timeout", heartbeat]
            self.logs.append(out / f"output-{i}-of-{count}.txt")
            with self.logs[i].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *map(str, [PROGRAM, *options, *(joining if count > 1 else [])])],
                    env=python_environment(**variables),
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

    def wait_for(self, condition):
        """Until a condition holds; none is left running when one ends before or it takes too long."""
        end = time.monotonic() + LONGEST
        while not condition():
            if time.monotonic() > end or any(p.poll() is not None for p in self.running):
                self.kill()
                pytest.fail(f"ended, or too slow: {self.output(0)[-2000:]}")
            time.sleep(0.01)

    def wait_for_checkpoint(self, step):
        self.wait_for(lambda: step in self.saved())

    def wait_until_all_wait(self):
        """Before the step `wait_before`."""
        self.wait_for(lambda: all((self.out / f"waits-{process.pid}").exists() for process in self.running))

    def proceed(self):
        self._go.touch()

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
