"""Reinforcement learning with 4-bit rollouts: a trainer and a rollout as two processes that agree to the bit.

    python examples/rl_loop.py --iterations 120 --out runs/rl
    python examples/rl_loop.py --engine ray --rollouts 2 --out runs/rl    # actors of Ray, restarted if they die

A small policy with experts learns to sort digits only from its reward (GRPO), under INT4 quantisation-aware training.
In each iteration the trainer sends 4-bit weights to the rollout, which writes answers with them. The trainer replays
the rollout's routing, and ends with an error unless the rollout's log-probabilities equal its own, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import re
import signal
import sys
from typing import Any

import jax
import numpy as np
from rl import rollout
from rl.engine import ClusterMissing, Rollout, RolloutLost, Stale, TrainerLost
from rl.grpo import Settings
from rl.learning import Disagreement
from rl.policy import RECIPE, Config
from rl.report import Progress, write
from rl.task import Task
from rl.training import Plan, Training


def arguments() -> argparse.Namespace:
    """Parses and checks the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    # Abbreviations are refused: --rollout alone is what the rollout process is started with.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
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
    parser.add_argument("--engine", choices=["process", "ray"], default="process", help="what runs the rollout")
    ray = parser.add_argument_group("with --engine ray")
    ray.add_argument("--rollouts", type=int, default=1, help="workers among which prompts are divided")
    ray.add_argument("--checkpoint-every", type=int, default=10, help="iterations; a restarted trainer goes on there")
    ray.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    ray.add_argument("--ray-address", metavar="HOST:PORT", help="of a cluster; default: one is started for this run")
    options = parser.parse_args()
    for name in ("iterations", "digits", "prompts", "updates", "layers", "rollouts", "checkpoint_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} needs 1 or more")
    if options.answers < 2 or options.experts < 2:
        parser.error("--answers and --experts need 2 or more: answers are compared, and each token has two experts")
    heads, groups = Config.heads, RECIPE.group_size
    if options.width < 1 or options.width % groups or options.width % (2 * heads):
        parser.error(f"--width {options.width}: needs a multiple of {groups}, the group that shares a scale")
    if options.seed < 0:
        parser.error("--seed needs 0 or more")
    if not options.learning_rate > 0 or not options.kl >= 0 or not 0 < options.timeout < float("inf"):
        parser.error("--learning-rate and --timeout need more than 0, --kl 0 or more")
    if options.engine == "process":
        for name in ("rollouts", "checkpoint_every", "resume", "ray_address"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')}: needs --engine ray")
        return options
    if importlib.util.find_spec("ray") is None:
        parser.error("--engine ray: Ray is not installed; pip install 'jaxlowprec[ray]'")
    if options.ray_address is not None and not re.fullmatch(r".+:[0-9]{1,5}", options.ray_address):
        parser.error(f"--ray-address {options.ray_address}: needs HOST:PORT")
    if options.rollouts > options.prompts:
        parser.error(f"--rollouts {options.rollouts}: needs at most as many as --prompts, {options.prompts}")
    return options


def planned(options: argparse.Namespace) -> Plan:
    """The run that the command line asks for."""
    length = Task(options.digits).length
    config = Config(layers=options.layers, width=options.width, experts=options.experts, length=length)
    settings = Settings(options.prompts, options.answers, options.updates, options.learning_rate, kl=options.kl)
    return Plan(options.digits, config, settings, options.iterations, options.seed)


def train(plan: Plan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in this process, with a rollout in another one. Returns the records of all iterations."""
    training, records = Training(plan), []
    with Rollout(plan.config, options.timeout, options.damage_version) as engine, Progress(plan.iterations) as progress:
        print(f"rollout: process {engine.process.pid}, listening at {engine.address}", flush=True)
        for version in range(1, plan.iterations + 1):
            records.append(training.step(engine, version))
            progress.show(records[-1])
    return records


def train_on_ray(plan: Plan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in actors of Ray. Returns the records of all iterations."""
    from rl.on_ray import cluster

    try:
        plan.claim(options.out, options.resume)
    except ValueError as error:
        sys.exit(f"rl_loop: {error}")
    # What a process has compiled, the one that replaces it loads.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.out.absolute() / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    with cluster.joined(options.ray_address, options.rollouts + 1):
        from rl.on_ray import driver

        return driver.train(plan, options)


def run(options: argparse.Namespace) -> None:
    """Trains, and writes the report."""
    plan = planned(options)
    on_ray = options.engine == "ray"
    where = "Ray" if on_ray else jax.default_backend()  # whose threads would be in the way of starting Ray
    weights = RECIPE.weight_format
    print(f"jaxlowprec on {where}, jax {jax.__version__}: {weights}, {plan.config}, {plan.settings}", flush=True)
    records = (train_on_ray if on_ray else train)(plan, options)
    write(records, plan.described(), options.out)
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
        run(arguments())
    except (ClusterMissing, RolloutLost, TrainerLost, Stale, Disagreement) as error:
        sys.exit(f"rl_loop: {error}")


if __name__ == "__main__":
    main()
