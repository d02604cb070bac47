"""The trainer's state, and an iteration from the sync of the weights to the optimizer's steps."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from rl import grpo
from rl.engine import Engine
from rl.learning import learn
from rl.policies import calibrate, made
from rl.policy import RECIPE, Config
from rl.task import Task


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that determines a run's numbers.

    Attributes:
        digits: digits to sort.
        config: sizes of the policy, whose length is that of the task.
        settings: of GRPO.
        iterations: for the schedule of the learning rate.
        seed: of initial parameters, prompts and answers.
    """

    digits: int
    config: Config
    settings: grpo.Settings
    iterations: int
    seed: int

    def described(self) -> dict[str, Any]:
        """The plan as JSON can hold it, for reports."""
        parts = {"config": dataclasses.asdict(self.config), "grpo": dataclasses.asdict(self.settings)}
        return parts | {"seed": self.seed, "recipe": repr(RECIPE), "jax": jax.__version__}

    def claim(self, folder: pathlib.Path, resume: bool) -> None:
        """Writes the plan into the folder of the run's checkpoints, or compares it with the one that is there.

        Raises:
            ValueError: there are checkpoints and `resume` is False, or those of another plan.
        """
        file, here = folder / "plan.json", json.dumps(dataclasses.asdict(self))
        if not any(folder.glob("checkpoints/[0-9]*")):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(here)
            return
        if not resume:
            raise ValueError(f"--out {folder}: has checkpoints; --resume goes on from them, another --out starts anew")
        mine, other = json.loads(here), json.loads(file.read_text())
        if differing := [name for name in mine if mine[name] != other.get(name)]:
            raise ValueError(
                f"--resume: the run in {folder} has another {differing[0]}; give the same, or another --out"
            )


class Training:
    """The policy, its optimizer, and what is known of an iteration.

    Attributes:
        policy, optimizer: the policy and its optimizer, which `step` changes.
    """

    def __init__(self, plan: Plan):
        self.plan, self._task = plan, Task(plan.digits)
        self.policy = made(plan.config, nnx.Rngs(plan.seed))
        self._initial = nnx.clone(self.policy) if plan.settings.kl else None
        self.optimizer = nnx.Optimizer(self.policy, grpo.optimizer(plan.settings, plan.iterations), wrt=nnx.Param)

    def step(self, engine: Engine, version: int) -> dict[str, Any]:
        """Iteration number `version`, from 1: syncs, lets the engine answer, and learns. Returns its record.

        Raises:
            Disagreement: log-probabilities differ; nothing was learned then. Errors of the engine.
        """
        settings, seed = self.plan.settings, self.plan.seed
        prompts = np.repeat(self._task.prompts(settings.prompts, seed, version), settings.answers, axis=0)
        calibrate(self.policy, prompts)
        sync_bytes, sync_seconds = engine.push(self.policy, version)
        started = time.perf_counter()
        answers = engine.generate(prompts, seed, version)
        generated = time.perf_counter() - started
        record = learn(self.policy, self.optimizer, answers, self._task, settings, engine, self._initial)
        return record | {"sync_bytes": sync_bytes, "sync_ms": 1e3 * sync_seconds, "generate_ms": 1e3 * generated}
