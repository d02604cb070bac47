"""A run ends at SIGTERM with a checkpoint, and SIGKILL at any time leaves a whole one. Several processes:
tests/distributed/test_preemption.py."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm import training
from lm.checkpoints import Checkpoints
from lm.data import Batches
from lm.mesh import ONE_DEVICE
from lm.model import SIZES
from lm.preemption import Notice, Preempted
from lm.recipes import run_named

from tests.helpers import python_environment

EXAMPLES = pathlib.Path(training.__file__).parents[1]
CONFIG = dataclasses.replace(SIZES["tiny"], layers=1, high_precision_last=0)
TEXT = np.random.default_rng(0).choice(np.frombuffer(b"the low bits of a block\n", np.uint8), 1 << 16)
STEPS, BATCH = 6, 2


class Terminating(Batches):
    """Batches that send SIGTERM to this process, twice, when they are asked for those of a step."""

    at = None

    def train(self, step):
        for _ in range(2 if step == self.at else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train(step)


@pytest.fixture
def notice():
    before = signal.getsignal(signal.SIGTERM)
    notice = Notice()
    notice.listen()
    yield notice
    signal.signal(signal.SIGTERM, before)


def trained(folder, notice, at=None):
    batches = Terminating(TEXT, BATCH, CONFIG.context, 0)
    batches.at = at
    schedule = training.Schedule(STEPS, 1e-3, BATCH, 0, 4, validation_batches=1)
    run = run_named("fp8_delayed:4:nvfp4", STEPS)
    return training.train(run, CONFIG, schedule, batches, folder, True, ONE_DEVICE, notice)


@pytest.mark.slow
def test_sigterm_saves_the_step_in_progress(notice, tmp_path):
    with pytest.raises(Preempted, match="fp8_delayed:4:nvfp4 after 3 of 6 steps"):
        trained(tmp_path, notice, at=2)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # nothing interrupts the end of the process
    with pytest.raises(Preempted, match="after 3 of 6"):
        trained(tmp_path, notice)  # SIGTERM before its first step: nothing to save
    log = tmp_path / "losses.json"
    log.write_text(json.dumps([-1.0, *json.loads(log.read_text())[1:]]))  # a mark: a run from the start would lose it
    resumed, whole = trained(tmp_path, Notice()), trained(tmp_path / "whole", Notice())
    assert resumed["losses"] == [-1.0, *whole["losses"][1:]]
    assert resumed["validation_loss"] == whole["validation_loss"]


SAVES_EVERY_STEP = """
import pathlib, sys, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from lm.checkpoints import Checkpoints

jax.config.update("jax_num_cpu_devices", 4)
split = NamedSharding(jax.make_mesh((4,), ("fsdp",)), PartitionSpec("fsdp"))
add = jax.jit(lambda x: x + 1, donate_argnums=0)  # as a training step, it may write where the last step's result was
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
parameters, state, losses, _ = checkpoints.restore(jnp.zeros(1 << 20, device=split), jnp.zeros(8))
while True:
    parameters, state = add(parameters), add(state)
    losses.append(float(len(losses)))
    checkpoints.save(parameters, state, losses, [])
"""


def killed(folder, moment):
    """Saves from the folder's checkpoint on, until a moment: while it saves, or so many seconds after it has saved."""
    path = os.pathsep.join([str(EXAMPLES), python_environment()["PYTHONPATH"]])
    before = latest(folder)
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES_EVERY_STEP, str(folder)],
            env=python_environment(PYTHONPATH=path),
            stdout=said,
            stderr=said,
        )
        try:
            while latest(folder) < before + 2 or (moment == "saving" and not list(folder.glob("checkpoints/*tmp*"))):
                assert process.poll() is None, (folder / "said.txt").read_text()[-2000:]
                time.sleep(0.002)
            time.sleep(0 if moment == "saving" else moment)
        finally:
            process.kill()
            process.wait()


def latest(folder):
    return max((int(step.name) for step in folder.glob("checkpoints/*") if step.name.isdecimal()), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["saving", 0.05, *(pytest.param(0.01 * i, marks=pytest.mark.every_case) for i in range(1, 12) if i != 5)]
)
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(moment, tmp_path):
    for _ in range(2):  # the second begins with what the first has left
        killed(tmp_path, moment)
        step = latest(tmp_path)
        parameters, state, losses, _ = Checkpoints(tmp_path).restore(jnp.zeros(1 << 20), jnp.zeros(8))
        assert len(losses) >= 2 and len(losses) == step
        assert losses == list(map(float, range(step)))
        for array in jax.tree.leaves((parameters, state)):
            np.testing.assert_array_equal(np.asarray(array), step)
