"""train_lm.py, which stops where a test wants it: no run ends before it can be killed, on any machine.

Run as a program; see running.py, which sets the variables:

    WAIT_BEFORE     a step before which each process waits until the file GO is there
    DIE_WHILE_SAVING    a step whose checkpoint a process begins to save, in the background, and then kills itself
"""

import os
import pathlib
import signal
import time

import train_lm
from lm import training
from lm.data import Batches


class Waiting(Batches):
    """Batches that are not given out before a file is there."""

    def train(self, step):
        go = pathlib.Path(os.environ["GO"])
        if step == int(os.environ["WAIT_BEFORE"]):
            go.with_name(f"waits-{os.getpid()}").touch()
            while not go.exists():
                time.sleep(0.01)
        return super().train(step)


class Dying(training.Checkpoints):
    """Checkpoints in whose making the process dies."""

    def save(self, parameters, state, losses, loads):
        super().save(parameters, state, losses, loads)
        if len(losses) == int(os.environ["DIE_WHILE_SAVING"]):
            os.kill(os.getpid(), signal.SIGKILL)


if "WAIT_BEFORE" in os.environ:
    train_lm.Batches = Waiting
if "DIE_WHILE_SAVING" in os.environ:
    training.Checkpoints = Dying
train_lm.main()
