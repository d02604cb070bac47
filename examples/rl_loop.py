"""Reinforcement learning with 4-bit rollouts: a trainer and a rollout as two processes that agree to the bit.

    python examples/rl_loop.py --iterations 120 --out runs/rl
    python examples/rl_loop.py --policy qwen3_moe --cache int8 --importance truncated --out runs/qwen

A small policy with experts learns to sort digits only from its reward (GRPO), under INT4 quantisation-aware training.
In each iteration the trainer sends 4-bit weights to the rollout, which writes answers with them. The trainer replays
the rollout's routing, and ends with an error unless the rollout's log-probabilities equal its own, bit for bit.
With --policy qwen3_moe the rollout keeps keys and values in a cache, and the trainer reads them as that cache keeps
them. The difference that is left is measured, and importance weights correct for it. rl_ray.py is the same run on Ray.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rl import rollout
from rl.engine import Rollout, RolloutLost, Stale
from rl.grpo import Settings
from rl.learning import Disagreement
from rl.policies import CACHES, POLICIES
from rl.policy import RECIPE, Config
from rl.report import Progress, write
from rl.task import Task
from rl.training import Plan, Training

EXCESS = "xla_allow_excess_precision"
NAME = pathlib.Path(sys.argv[0]).stem
Train = Callable[[Plan, argparse.Namespace], list[dict[str, Any]]]


def options_of_a_run(description: str | None = __doc__) -> argparse.ArgumentParser:
    """Returns the options of a run."""
    formatter = argparse.RawDescriptionHelpFormatter
    # Abbreviations are refused: --rollout alone is what the rollout process is started with.
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/rl"))
    parser.add_argument("--seed", type=int, default=0, help="seed of initial parameters, prompts and answers")
    parser.add_argument("--digits", type=int, default=4, help="digits to sort")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per iteration")
    parser.add_argument("--answers", type=int, default=16, help="answers per prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps per iteration")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the divergence from the initial policy")
    parser.add_argument("--policy", choices=POLICIES, default="small", help="small, or the library's decoder")
    parser.add_argument("--cache", choices=CACHES, default="float32", help="what keys and values are kept as")
    parser.add_argument("--importance", choices=["none", "truncated", "masked"], default="none", help="token weights")
    parser.add_argument(
        "--importance-per", choices=["token", "sequence", "sequence_mean"], default="token", help="what has a ratio"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one process waits for the other")
    parser.add_argument(
        "--damage-version", type=int, help="let the rollout change one 4-bit code of this version, to see it caught"
    )
    parser.add_argument("--checkpoint-every", type=int, help="iterations; default: 10 with --resume, otherwise none")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints in --out")
    return parser


def arguments(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parses and checks the command line; by default those of `options_of_a_run`."""
    parser = parser or options_of_a_run()
    options = parser.parse_args()
    if options.checkpoint_every is None and options.resume:
        options.checkpoint_every = 10
    for name in ("iterations", "digits", "prompts", "updates", "layers", "checkpoint_every"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} needs 1 or more")
    if options.answers < 2 or options.experts < 2:
        parser.error("--answers and --experts need 2 or more: answers are compared, and each token has two experts")
    heads, groups = Config.heads, RECIPE.group_size
    if options.width < 1 or options.width % groups or options.width % (2 * heads):
        parser.error(f"--width {options.width}: needs a multiple of {groups}, the group that shares a scale")
    if options.policy == "small" and options.cache != "float32":
        parser.error(f"--cache {options.cache}: needs --policy qwen3_moe; the small policy has no cache")
    if options.seed < 0:
        parser.error("--seed needs 0 or more")
    if not options.learning_rate > 0 or not options.kl >= 0 or not 0 < options.timeout < float("inf"):
        parser.error("--learning-rate and --timeout need more than 0, --kl 0 or more")
    if options.damage_version is not None and not 1 <= options.damage_version <= options.iterations:
        parser.error(f"--damage-version {options.damage_version}: needs 1 to --iterations, {options.iterations}")
    if fault := why_not_a_folder(options.out):
        parser.error(f"--out {options.out}: {fault}; needs a folder that can be written")
    return options


def why_not_a_folder(path: pathlib.Path) -> str | None:
    """Makes a folder, so that a run does not end without a place for its report; returns what is wrong, if anything."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(path, os.W_OK | os.X_OK) else "it cannot be written to"


def planned(options: argparse.Namespace) -> Plan:
    """The run that the command line asks for."""
    length = Task(options.digits).length
    sizes = {"layers": options.layers, "width": options.width, "experts": options.experts, "length": length}
    config = Config(**sizes, kind=options.policy, cache=options.cache)
    weights = {"importance": options.importance, "importance_per": options.importance_per}
    settings = Settings(
        options.prompts, options.answers, options.updates, options.learning_rate, kl=options.kl, **weights
    )
    return Plan(options.digits, config, settings, options.iterations, options.seed)


def train(plan: Plan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in this process, with a rollout in another one. Returns the records of all iterations."""
    training, records, checkpoints = Training(plan), [], None
    if options.checkpoint_every:
        from rl.checkpoints import Checkpoints

        checkpoints = Checkpoints(options.out / "checkpoints")
        if records := checkpoints.restore(training):
            print(f"going on after iteration {len(records)}", flush=True)
        elif options.resume:
            print(f"no checkpoint in {options.out}: the run begins with iteration 1", flush=True)
    with Rollout(plan.config, options.timeout, options.damage_version) as engine, Progress(plan.iterations) as progress:
        here = jax.default_backend()
        print(f"rollout: process {engine.process.pid}, listening at {engine.address}; on {here}", flush=True)
        for version in range(len(records) + 1, plan.iterations + 1):
            records.append(training.step(engine, version))
            progress.show(records[-1])
            if checkpoints and (version % options.checkpoint_every == 0 or version == plan.iterations):
                checkpoints.save(training, records)
    if checkpoints:
        checkpoints.close()
    return records


def forbid_excess_precision() -> None:
    """Sets XLA's flag, for this process and those that it starts, before the first program is compiled.

    With excess precision XLA leaves out roundings to bfloat16, in each program elsewhere. A flag that is set stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if EXCESS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{EXCESS}=false".strip()


def run(options: argparse.Namespace, train: Train = train) -> None:
    """Trains, and writes the report."""
    plan, weights = planned(options), RECIPE.weight_format
    print(f"jaxlowprec, jax {jax.__version__}: {weights}, {plan.config}, {plan.settings}", flush=True)
    if options.checkpoint_every:
        try:
            plan.claim(options.out, options.resume)
        except ValueError as error:
            sys.exit(f"{NAME}: {error}")
    records = train(plan, options)
    write(records, plan.described(), options.out)
    last = records[-10:]
    mismatch = options.out / "mismatch.png"
    print(
        f"\nreward of the last {len(last)} iterations: {np.mean([r['reward'] for r in last]):.3f}; "
        f"train_rollout_logprob_abs_diff: {max(r['train_rollout_logprob_abs_diff'] for r in records):g} in "
        f"{len(records)} iterations, {sum(r['compared'] for r in records):,} log-probabilities\n"
        f"report: {options.out / 'report.json'}   picture: {options.out / 'reward.png'}"
        + (f"   differences: {mismatch}" if mismatch.exists() else "")
    )


def main(options: argparse.Namespace, train: Train = train) -> None:
    """Runs the trainer. An error that the user can do something about is a line, without a traceback."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # all processes share a GPU, if there is one
    forbid_excess_precision()
    # Ctrl-C ends this process at once, and the others with it. A KeyboardInterrupt would be lost during a garbage
    # collection, because its callbacks (JAX has one) may not raise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run(options, train)
    except (RolloutLost, Stale, Disagreement) as error:
        sys.exit(f"{NAME}: {error}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--rollout"]:  # in the process that the trainer starts
        rollout.main()
    else:
        main(arguments())
