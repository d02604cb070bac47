"""The training of a decoder, or of its adapters: a progress bar, checkpoints, and the same bits after resuming."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jaxlowprec as jlp
from jaxlowprec.decoder import Decoder, loss
from lm.checkpoints import Checkpoints
from lm.data import Batches
from lm.training import Schedule, optimizer, recipe_context

VALIDATION = 8  # batches


def train(
    decoder: Decoder,
    wanted: type[nnx.Param],
    recipe: jlp.Recipe | None,
    batches: Batches,
    schedule: Schedule,
    folder: pathlib.Path,
) -> list[float]:
    """Trains a decoder in place, from the latest checkpoint in the folder if there is one.

    Arguments:
        wanted: the type of the variables that are trained.
        recipe: of the products of the linears.
        folder: where checkpoints are kept.

    Returns:
        The cross-entropy of each step, those before a checkpoint included.
    """
    transformation = optimizer(schedule)
    graph, trained, rest = nnx.split(decoder, wanted, ...)
    state = transformation.init(trained)
    checkpoints = Checkpoints(folder)
    trained, state, losses, _ = checkpoints.restore(trained, state)

    @jax.jit(donate_argnums=(0, 1))
    def step(trained, state, rest, tokens):
        def value(trained):
            return loss(nnx.merge(graph, trained, rest), tokens)

        (_, found), gradients = jax.value_and_grad(value, has_aux=True)(trained)
        updates, state = transformation.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, found

    quiet = {"mininterval": 0.2 if sys.stderr.isatty() else 10.0}
    first, total = len(losses), schedule.steps
    with recipe_context(recipe), tqdm(range(first, total), initial=first, total=total, unit="step", **quiet) as bar:
        for number in bar:
            trained, state, found = step(trained, state, rest, batches.train(number))
            losses.append(float(found))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            if len(losses) % schedule.checkpoint_every == 0 or len(losses) == total:
                checkpoints.save(trained, state, losses, [])
    checkpoints.close()
    nnx.update(decoder, trained)
    return losses


def validation_loss(decoder: Decoder, recipe: jlp.Recipe | None, batches: Batches) -> float:
    """The mean cross-entropy on text that is not trained on."""
    graph, state = nnx.split(decoder)

    @jax.jit
    def evaluate(state: Any, tokens: jax.Array) -> jax.Array:
        return loss(nnx.merge(graph, state), tokens)[1]

    with recipe_context(recipe):
        return float(np.mean([evaluate(state, tokens) for tokens in batches.validate(VALIDATION)]))
