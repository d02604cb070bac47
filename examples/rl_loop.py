"""Reinforcement learning with 4-bit rollouts: a trainer and a rollout as two processes that agree to the bit.

    python examples/rl_loop.py --iterations 120 --out runs/rl

A small policy with experts learns to sort digits only from its reward (GRPO), under INT4 quantisation-aware training.
In each iteration the trainer sends 4-bit weights to the rollout, which writes answers with them. The trainer replays
the rollout's routing, and ends with an error unless the rollout's log-probabilities equal its own, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
from flax import nnx
from rl import rollout
from rl.engine import Rollout, RolloutLost, Stale
from rl.grpo import Settings, optimizer
from rl.learning import Disagreement, learn
from rl.policy import RECIPE, Config, Policy
from rl.report import Progress, write
from rl.task import Task


def arguments() -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/rl"))
    parser.add_argument("--seed", type=int, default=0, help="seed of initial parameters, prompts and answers")
    parser.add_argument("--digits", type=int, default=4, help="digits to sort")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per iteration")
    parser.add_argument("--answers", type=int, default=16, help="answers per prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps per iteration")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the divergence from the initial policy")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one process waits for the other")
    parser.add_argument(
        "--damage-version", type=int, help="let the rollout change one 4-bit code of this version, to see it caught"
    )
    options = parser.parse_args()
    for name in ("iterations", "digits", "prompts", "updates", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} needs 1 or more")
    if options.answers < 2 or options.experts < 2:
        parser.error("--answers and --experts need 2 or more: answers are compared, and each token has two experts")
    heads, groups = Config.heads, RECIPE.group_size
    if options.width < 1 or options.width % groups or options.width % (2 * heads):
        parser.error(f"--width {options.width}: needs a multiple of {groups}, the group that shares a scale")
    if options.seed < 0:
        parser.error("--seed needs 0 or more")
    if not options.learning_rate > 0 or not options.kl >= 0 or not 0 < options.timeout < float("inf"):
        parser.error("--learning-rate and --timeout need more than 0, --kl 0 or more")
    return options


def train(options: argparse.Namespace) -> None:
    """Trains: the trainer's process."""
    task = Task(options.digits)
    config = Config(layers=options.layers, width=options.width, experts=options.experts, length=task.length)
    settings = Settings(options.prompts, options.answers, options.updates, options.learning_rate, kl=options.kl)
    policy = Policy(config, nnx.Rngs(options.seed))
    initial = nnx.clone(policy) if settings.kl else None
    state = nnx.Optimizer(policy, optimizer(settings, options.iterations), wrt=nnx.Param)
    described = {"config": dataclasses.asdict(config), "grpo": dataclasses.asdict(settings)}
    weights = RECIPE.weight_format
    print(f"jaxlowprec on {jax.default_backend()}, jax {jax.__version__}: {weights}, {config}, {settings}", flush=True)

    records = []
    with Rollout(config, options.timeout, options.damage_version) as engine, Progress(options.iterations) as progress:
        print(f"rollout: process {engine.process.pid}, listening at {engine.address}", flush=True)
        for version in range(1, options.iterations + 1):
            sync_bytes, sync_seconds = engine.push(policy, version)
            prompts = np.repeat(task.prompts(settings.prompts, options.seed, version), settings.answers, axis=0)
            started = time.perf_counter()
            answers = engine.generate(prompts, options.seed, version)
            generated = time.perf_counter() - started
            record = learn(policy, state, answers, task, settings, engine, initial)
            took = {"sync_bytes": sync_bytes, "sync_ms": 1e3 * sync_seconds, "generate_ms": 1e3 * generated}
            records.append(record | took)
            progress.show(records[-1])

    write(records, described | {"seed": options.seed, "recipe": repr(RECIPE), "jax": jax.__version__}, options.out)
    last = records[-10:]
    print(
        f"\nreward of the last {len(last)} iterations: {np.mean([r['reward'] for r in last]):.3f}; "
        f"train_rollout_logprob_abs_diff: {max(r['train_rollout_logprob_abs_diff'] for r in records):g} in "
        f"{len(records)} iterations, {sum(r['compared'] for r in records):,} log-probabilities\n"
        f"report: {options.out / 'report.json'}   picture: {options.out / 'reward.png'}"
    )


def main() -> None:
    """Runs the trainer, or, in the process that the trainer starts, the rollout."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both processes share a GPU, if there is one
    if sys.argv[1:] == ["--rollout"]:
        rollout.main()
        return
    # Ctrl-C ends this process at once, and the rollout with it. A KeyboardInterrupt would be lost during a garbage
    # collection, because its callbacks (JAX has one) may not raise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        train(arguments())
    except (RolloutLost, Stale, Disagreement) as error:
        sys.exit(f"rl_loop: {error}")


if __name__ == "__main__":
    main()
