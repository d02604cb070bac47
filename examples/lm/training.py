"""One training run: AdamW with warm-up and decay, a progress bar, checkpoints that resume."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import jaxlowprec as jlp
from lm.data import Batches
from lm.model import Config, LanguageModel, loss


@dataclasses.dataclass(frozen=True)
class Run:
    """What makes a run.

    Attributes:
        name: of its folder and its row in the report.
        recipe: None is bf16.
        perturbation: relative size of a random change of the initial parameters: 0, or 1e-4 for the noise floor.
    """

    name: str
    recipe: jlp.Recipe | None = None
    perturbation: float = 0.0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int
    learning_rate: float
    batch: int
    seed: int
    checkpoint_every: int
    validation_batches: int = 32


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """AdamW: linear warm-up over a tenth of the steps (40 at most), cosine decay to a tenth, clipping at norm 1.

    The amax histories of delayed scaling, where a recipe has them, go past all of it.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        schedule.learning_rate,
        min(40, max(1, schedule.steps // 10)),
        max(schedule.steps, 2),
        schedule.learning_rate / 10,
    )
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    return jlp.delayed_scaling.overwrite_with_gradient(optax.chain(optax.clip_by_global_norm(1.0), adamw))


def initial_parameters(config: Config, run: Run, seed: int) -> tuple[nnx.GraphDef, Any]:
    """The model's structure and its parameters, alike for all runs of a seed but for the perturbation.

    Made in the recipe's scope: delayed scaling's state comes with the parameters.
    """
    with recipe_context(run.recipe):
        graph, parameters = nnx.split(LanguageModel(config, nnx.Rngs(seed)), nnx.Param)
    if run.perturbation:
        leaves, structure = jax.tree.flatten(parameters)
        keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
        leaves = [p * (1 + run.perturbation * jax.random.normal(k, p.shape)) for p, k in zip(leaves, keys, strict=True)]
        parameters = jax.tree.unflatten(structure, leaves)
    return graph, parameters


def recipe_context(recipe: jlp.Recipe | None):
    """The recipe's scope; none for bf16."""
    return contextlib.nullcontext() if recipe is None else jlp.autocast(recipe)


def make_steps(graph: nnx.GraphDef, transformation: optax.GradientTransformation):
    """The jitted training step and evaluation. The recipe is part of jit's cache key: call them in its context."""

    @jax.jit(donate_argnums=(0, 1))
    def train(parameters, state, tokens):
        value, gradients = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), tokens))(parameters)
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    @jax.jit
    def evaluate(parameters, tokens):
        return loss(nnx.merge(graph, parameters), tokens)

    return train, evaluate


def saved_bytes(graph: nnx.GraphDef, parameters: Any, recipe: jlp.Recipe | None, tokens: jax.Array) -> int:
    """Bytes that autodiff keeps for the backward pass and that grow with the batch, for one batch."""

    def kept(batch):
        shape = jax.ShapeDtypeStruct((batch, *tokens.shape[1:]), tokens.dtype)

        def forward(p, t):
            return jax.vjp(lambda q: loss(nnx.merge(graph, q), t), p)[1]

        with recipe_context(recipe):
            pullback = jax.eval_shape(forward, parameters, shape)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    batch = tokens.shape[0]
    return kept(2 * batch) - kept(batch)


def train(run: Run, config: Config, schedule: Schedule, batches: Batches, folder: pathlib.Path, resume: bool) -> dict:
    """Trains one run and returns its part of the report."""
    graph, parameters = initial_parameters(config, run, schedule.seed)
    transformation = optimizer(schedule)
    state = transformation.init(parameters)
    step_function, evaluate = make_steps(graph, transformation)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "losses.json"

    losses, times, first = [], [], 0
    manager = ocp.CheckpointManager(
        (folder / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
    )
    if resume and manager.latest_step() is not None and log.exists():
        first = manager.latest_step()
        restored = manager.restore(first, args=ocp.args.StandardRestore({"parameters": parameters, "state": state}))
        parameters, state = restored["parameters"], restored["state"]
        losses = json.loads(log.read_text())[:first]

    tokens_per_step, compile_seconds = schedule.batch * config.context, 0.0
    saved = saved_bytes(graph, parameters, run.recipe, batches.train(0))
    quiet = {"mininterval": 0.2 if sys.stderr.isatty() else 10.0}
    bar = tqdm(
        range(first, schedule.steps), initial=first, total=schedule.steps, desc=f"{run.name:>14}", unit="step", **quiet
    )
    with recipe_context(run.recipe):
        for step in bar:
            started = time.perf_counter()
            parameters, state, value = step_function(parameters, state, batches.train(step))
            losses.append(float(value))
            times.append(time.perf_counter() - started)
            if step == first:
                compile_seconds = times.pop()
            elif len(times) % 10 == 0:
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens_per_step / np.median(times[-50:]):,.0f} tokens/s")
            done = step + 1
            if done % schedule.checkpoint_every == 0 or done == schedule.steps:
                log.write_text(json.dumps(losses))
                content = {"parameters": parameters, "state": state}
                manager.save(done, args=ocp.args.StandardSave(content), force=True)
        validation = [float(evaluate(parameters, batch)) for batch in batches.validate(schedule.validation_batches)]
    manager.close()
    tail = losses[-max(1, min(50, len(losses) // 4)) :]
    return {
        "name": run.name,
        "recipe": repr(run.recipe) if run.recipe else "none (bfloat16)",
        "losses": losses,
        "loss": float(np.mean(tail)),
        "validation_loss": float(np.mean(validation)),
        "finite": bool(np.isfinite(losses).all() and np.isfinite(validation).all()),
        "step_seconds": float(np.median(times)) if times else None,
        "tokens_per_second": tokens_per_step / float(np.median(times)) if times else None,
        "compile_seconds": compile_seconds,
        "saved_activation_bytes": saved,
        "parameters": sum(
            leaf.size
            for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
            if not jlp.delayed_scaling.is_state(path)
        ),
    }
