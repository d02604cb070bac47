"""Checkpoints of a run: every process writes its part in the background, and any mesh of any processes goes on."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """Saves a run's parameters, optimizer state, losses and experts' loads in its folder; restores them to any layout.

    Each process writes the shards it holds while training goes on. Orbax renames a checkpoint to the number of its step
    when all processes have written theirs, and removes the one before it only then, so that a process that is killed
    at any time leaves a whole checkpoint.
    """

    def __init__(self, folder: pathlib.Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._losses, self._loads = folder / "losses.json", folder / "expert_loads.json"
        options = ocp.CheckpointManagerOptions(max_to_keep=1, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def restore(self, parameters: Any, state: Any) -> tuple[Any, Any, list[float], list[float]]:
        """The latest parameters, state and figures, placed like those given; without a checkpoint those given."""
        step = self._manager.latest_step()
        if step is None:
            return parameters, state, [], []
        content = {"parameters": parameters, "state": state}
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(content))
        losses = json.loads(self._losses.read_text())[:step]
        loads = json.loads(self._loads.read_text())[:step] if self._loads.exists() else []
        return restored["parameters"], restored["state"], losses, loads

    def save(self, parameters: Any, state: Any, losses: list[float], loads: list[float]) -> None:
        """Begins to save a checkpoint, unless it is the latest; the number of losses is the number of its step."""
        step = len(losses)
        if step in (0, self._manager.latest_step()):
            return
        if jax.process_index() == 0:  # before the checkpoint: figures of later steps do no harm
            _replace(self._losses, json.dumps(losses))
            if loads:
                _replace(self._loads, json.dumps(loads))
        content = {"parameters": parameters, "state": state}
        self._manager.save(step, args=ocp.args.StandardSave(content), force=True)

    def close(self) -> None:
        """Waits until the latest checkpoint is whole, which needs all processes."""
        self._manager.close()


def _replace(file: pathlib.Path, text: str) -> None:
    """Writes a file anew, so that a process that is killed leaves the old text or the new one."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)
