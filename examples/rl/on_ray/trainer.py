"""The trainer: an actor that goes on from its latest checkpoint when Ray restarts it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import ray

from rl.checkpoints import Checkpoints
from rl.on_ray.rollouts import Rollouts
from rl.on_ray.worker import worker_name
from rl.training import Plan, Training


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where checkpoints are, and after how many iterations one is saved. All nodes have to see the folder."""

    folder: pathlib.Path
    every: int


class Trainer:
    """The actor.

    Arguments:
        plan: the run.
        workers: how many `Worker` actors there are.
        saving: its checkpoints; a latest one that is there is restored.
        timeout: see `Rollouts`.
    """

    def __init__(self, plan: Plan, workers: int, saving: Saving, timeout: float):
        self._plan, self._saving = plan, saving
        self._training, self._checkpoints = Training(plan), Checkpoints(saving.folder)
        self._records = self._checkpoints.restore(self._training)
        self._rollouts = Rollouts([ray.get_actor(worker_name(i)) for i in range(workers)], timeout)

    def process(self) -> int:
        """The id of the actor's process."""
        return os.getpid()

    def records(self) -> list[dict[str, Any]]:
        """The records of all iterations that this training knows of: those before its checkpoint, and those since."""
        return self._records

    def step(self) -> dict[str, Any]:
        """The next iteration. Returns its record. See `Training.step`."""
        version = len(self._records) + 1
        record = self._training.step(self._rollouts, version)
        record |= {"published_digest": self._rollouts.published_digest, "answered_by": self._rollouts.answered_by}
        self._records.append(record)
        if version % self._saving.every == 0 or version == self._plan.iterations:
            self._checkpoints.save(self._training, self._records)
        return record

    def close(self) -> None:
        """Waits until the latest checkpoint is whole."""
        self._checkpoints.close()
