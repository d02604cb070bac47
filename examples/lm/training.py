"""One training run: an optimizer with warm-up and decay, a progress bar, checkpoints that resume, an end at SIGTERM."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jaxlowprec as jlp
from lm.checkpoints import Checkpoints
from lm.data import Batches
from lm.mesh import ONE_DEVICE, Layout
from lm.model import Config, LanguageModel, loss, training_loss
from lm.optimizers import Optimizer
from lm.preemption import Notice, Preempted


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a comparison.

    Attributes:
        name: the name of its row in the report.
        recipe: the recipe, or that of each step; None is bf16.
        perturbation: relative size of a random change of the initial parameters: 0, or 1e-4 for the noise floor.
        optimizer: the optimizer, and how it keeps its states.
    """

    name: str
    recipe: jlp.Recipe | jlp.RecipeSchedule | None = None
    perturbation: float = 0.0
    optimizer: Optimizer = Optimizer()

    def at(self, step: int) -> jlp.Recipe | None:
        """The recipe of a step."""
        return self.recipe.at(step) if isinstance(self.recipe, jlp.RecipeSchedule) else self.recipe

    @property
    def folder(self) -> str:
        """The name as that of a folder."""
        return re.sub("[, :]+", "-", self.name)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    steps: int
    learning_rate: float
    batch: int
    seed: int
    checkpoint_every: int
    validation_batches: int = 32
    telemetry_every: int = 0  # steps from one record of telemetry to the next; 0: none


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """AdamW in float32, see `Optimizer.transformation`."""
    return Optimizer().transformation(schedule)


def initial_parameters(config: Config, run: Run, seed: int, layout: Layout) -> tuple[nnx.GraphDef, Any]:
    """The model's structure and its parameters, the same for all runs of a seed except for the perturbation.

    They are made in the scope of the first recipe, so that delayed scaling's state is made with the parameters.
    """

    def model():
        return LanguageModel(config, nnx.Rngs(seed))

    def parameters():
        values = nnx.state(model(), nnx.Param)
        if not run.perturbation:
            return values
        leaves, structure = jax.tree.flatten(values)
        keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
        leaves = [p * (1 + run.perturbation * jax.random.normal(k, p.shape)) for p, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(structure, leaves)

    with recipe_context(run.at(0)):
        return nnx.split(nnx.eval_shape(model), nnx.Param)[0], layout.create(parameters)


def recipe_context(recipe: jlp.Recipe | None):
    """The recipe's scope; an empty one for bf16."""
    return contextlib.nullcontext() if recipe is None else jlp.autocast(recipe)


def make_steps(
    graph: nnx.GraphDef,
    transformation: optax.GradientTransformation,
    shardings: Any = None,
    recorder: jlp.telemetry.Recorder | None = None,
):
    """The jitted training step and evaluation. The recipe is part of jit's cache key: call them in its context.

    A step returns parameters, optimizer state and the loss; with experts, a pair of loss and load in place of the loss,
    see `training_loss`. `shardings`: those of all three results. With a recorder a step takes its number as well, and
    returns what its layers measured as well.
    """
    if recorder is not None and shardings is not None:
        shardings = (*shardings[:-1], (shardings[-1], shardings[-1]))

    @jax.jit(donate_argnums=(0, 1), out_shardings=shardings)
    def train(parameters, state, tokens, number=0):
        def trained(p):
            return training_loss(nnx.merge(graph, p), tokens)

        found = None
        if recorder is None:
            (_, (value, load)), gradients = jax.value_and_grad(trained, has_aux=True)(parameters)
        else:
            value_and_grad = jlp.telemetry.value_and_grad(trained, has_aux=True, on=recorder.due(number))
            ((_, (value, load)), gradients), found = value_and_grad(parameters)
        updates, state = transformation.update(gradients, state, parameters)
        value = value if load is None else (value, load)
        return optax.apply_updates(parameters, updates), state, value if recorder is None else (value, found)

    @jax.jit(out_shardings=None if shardings is None else shardings[-1])
    def evaluate(parameters, tokens):
        return loss(nnx.merge(graph, parameters), tokens)

    return train, evaluate


def saved_bytes(graph: nnx.GraphDef, parameters: Any, recipe: jlp.Recipe | None, shape: tuple[int, int]) -> int:
    """Bytes that autodiff keeps on all devices for the backward pass and that grow with the batch.

    `shape`: the shape of a batch.
    """

    def kept(batch):
        def forward(p, t):
            return jax.vjp(lambda q: loss(nnx.merge(graph, q), t), p)[1]

        with recipe_context(recipe):
            pullback = jax.eval_shape(forward, parameters, jax.ShapeDtypeStruct((batch, shape[1]), np.int32))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    return kept(2 * shape[0]) - kept(shape[0])


def train(
    run: Run,
    config: Config,
    schedule: Schedule,
    batches: Batches,
    folder: pathlib.Path,
    resume: bool,
    layout: Layout = ONE_DEVICE,
    notice: Notice | None = None,
) -> dict:
    """Trains one run and returns its part of the report.

    Raises:
        Preempted: a process has received the notice; the run is saved.
    """
    with layout.scope(), _recorder(run, schedule, folder) as recorder:
        return _train(run, config, schedule, batches, folder, resume, layout, recorder, notice or Notice())


def _recorder(run: Run, schedule: Schedule, folder: pathlib.Path) -> Any:
    """Records telemetry if the schedule says so; of several processes the first one does."""
    if not schedule.telemetry_every:
        return contextlib.nullcontext()
    path = folder / "telemetry.jsonl" if jax.process_index() == 0 else None
    return jlp.telemetry.Recorder(path, every=schedule.telemetry_every, recipe=run.name, seed=schedule.seed)


def _train(run, config, schedule, batches, folder, resume, layout, recorder, notice) -> dict:
    transformation = run.optimizer.transformation(schedule)
    graph, parameters = initial_parameters(config, run, schedule.seed, layout)
    if run.optimizer.states == "float32":
        state = layout.create(transformation.init, parameters)
    else:
        parameters, state = layout.create(functools.partial(run.optimizer.start, schedule), parameters)
    placed = layout.shardings((parameters, state))
    shardings = placed and (*placed, layout.replicated())
    step_function, evaluate = make_steps(graph, transformation, shardings, recorder)
    checkpoints, losses, loads, times = Checkpoints(folder), [], [], []
    if resume:
        parameters, state, losses, loads = checkpoints.restore(parameters, state)

    first, tokens_per_step, compile_seconds = len(losses), schedule.batch * config.context, 0.0
    saved = saved_bytes(graph, parameters, run.at(0), (schedule.batch, config.context + 1))
    quiet = {"mininterval": 0.2 if sys.stderr.isatty() else 10.0, "disable": jax.process_index() > 0}
    bar = tqdm(
        range(first, schedule.steps), initial=first, total=schedule.steps, desc=f"{run.name:>14}", unit="step", **quiet
    )
    compiled_for = set()
    for step in bar:
        if notice.reached(layout):
            checkpoints.save(parameters, state, losses, loads)
            checkpoints.close()
            raise Preempted(f"{run.name} after {step} of {schedule.steps} steps")
        started, recipe = time.perf_counter(), run.at(step)
        batch = layout.place(batches.train(step), schedule.batch)
        with recipe_context(recipe):
            parameters, state, value = step_function(parameters, state, batch, step)
        value, found = (value, None) if recorder is None else value
        if config.experts:
            value, load = value
            loads.append(float(load))
        losses.append(float(value))
        if recorder is not None:
            recorder.record(step, found, loss=losses[-1])
        times.append(time.perf_counter() - started)
        if recipe not in compiled_for:
            compiled_for.add(recipe)
            compile_seconds += times.pop()
        elif len(times) % 10 == 0:
            load = f"largest load {loads[-1]:.2f}, " if loads else ""
            speed = tokens_per_step / np.median(times[-50:])
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {load}{speed:,.0f} tokens/s")
        if len(losses) % schedule.checkpoint_every == 0 or len(losses) == schedule.steps:
            checkpoints.save(parameters, state, losses, loads)
    checkpoints.close()
    validation = []
    for batch in batches.validate(schedule.validation_batches):
        if notice.reached(layout):
            raise Preempted(f"{run.name} in its validation, which begins again")
        with recipe_context(run.at(schedule.steps - 1)):
            validation.append(float(evaluate(parameters, layout.place(batch, schedule.batch))))
    tail = slice(-max(1, min(50, len(losses) // 4)), None)
    of_experts = {"expert_loads": loads, "expert_load": float(np.mean(loads[tail]))} if config.experts else {}
    return of_experts | {
        "name": run.name,
        "recipe": repr(run.recipe) if run.recipe else "none (bfloat16)",
        "losses": losses,
        "loss": float(np.mean(losses[tail])),
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
