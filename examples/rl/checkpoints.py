"""Checkpoints of a run: policy, optimizer and records, written in the background."""

from __future__ import annotations

import pathlib
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

from rl.training import Training


class Checkpoints:
    """Saves a training and its records in a folder, and restores them.

    Orbax renames a checkpoint to its number of iterations when it is whole, and removes the one before it only then, so
    that a process that is killed at any time leaves a whole checkpoint.
    """

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def restore(self, training: Training) -> list[dict[str, Any]]:
        """Gives a training the state of the latest checkpoint. Returns the records up to it; [] if there is none."""
        iterations = self._manager.latest_step()
        if iterations is None:
            return []
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(_state(training)), records=ocp.args.JsonRestore())
        found = self._manager.restore(iterations, args=wanted)
        nnx.update((training.policy, training.optimizer), found.state)
        return found.records

    def save(self, training: Training, records: list[dict[str, Any]]) -> None:
        """Begins to save a training after as many iterations as there are records."""
        saved = ocp.args.Composite(state=ocp.args.StandardSave(_state(training)), records=ocp.args.JsonSave(records))
        self._manager.save(len(records), args=saved, force=True)

    def close(self) -> None:
        """Waits until the latest checkpoint is whole."""
        self._manager.close()


def _state(training: Training) -> Any:
    return nnx.state((training.policy, training.optimizer))
