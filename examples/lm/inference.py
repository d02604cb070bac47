"""What a finished run of train_lm.py is used for: its model, and text that it generates."""

from __future__ import annotations

import json
import pathlib
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from lm.model import Config, LanguageModel


def restored_model(run: pathlib.Path, name: str) -> LanguageModel:
    """The model of a run of that name in a folder of train_lm.py, with its latest parameters."""
    report = json.loads((run / "report.json").read_text())
    config = Config(**report["settings"]["config"])
    if config.experts:
        raise SystemExit(f"{run} was trained with --experts, which this example has no use for; train without")
    graph, parameters = nnx.split(LanguageModel(config, nnx.Rngs(0)), nnx.Param)
    item = {"parameters": parameters}
    wanted = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    with ocp.CheckpointManager((run / name / "checkpoints").absolute()) as manager:
        restored = manager.restore(manager.latest_step(), args=wanted)
    return nnx.merge(graph, restored["parameters"])


@nnx.jit
def logits_of(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """The logits at every place."""
    return model(tokens)


def generate(model: LanguageModel, prompt: bytes, count: int) -> tuple[bytes, np.ndarray, float]:
    """The most likely continuation, the logits [count, 256] that it was chosen by, and bytes per second."""
    context = model.config.context
    text, chosen_by, started = list(prompt), [], 0.0
    for _ in range(count):
        window = text[-context:]
        tokens = np.zeros((1, context), np.int32)  # always one shape; attention is causal: zeros are not seen
        tokens[0, : len(window)] = window
        chosen_by.append(np.asarray(logits_of(model, tokens)[0, len(window) - 1]))
        text.append(int(chosen_by[-1].argmax()))
        started = started or time.perf_counter()  # after compiling
    return bytes(text), np.stack(chosen_by), (count - 1) / max(time.perf_counter() - started, 1e-9)
