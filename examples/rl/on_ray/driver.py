"""The process of the command line: starts the actors, asks the trainer for iterations, and waits while it restarts."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import ray

from jaxlowprec.weight_sync import PeerLost, PeerTimeout
from rl.engine import TrainerLost
from rl.on_ray.rollouts import RETRY
from rl.on_ray.trainer import Saving, Trainer
from rl.on_ray.transport import answer_of
from rl.on_ray.worker import Worker, worker_name
from rl.report import Progress
from rl.training import Plan

LONGEST = 4  # timeouts without the end of an iteration, after which the driver gives up


def train(plan: Plan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in actors of the joined cluster. Returns the records of all iterations.

    Raises:
        TrainerLost: the trainer does not come back, or dies so often that no iteration ends in `LONGEST` timeouts.
        RolloutLost: no worker answers in time. Errors of the trainer's `step`.
    """
    restarted = {"num_cpus": 1, "max_restarts": -1}
    make_worker, make_trainer = ray.remote(**restarted)(Worker), ray.remote(**restarted)(Trainer)
    workers = [
        make_worker.options(name=worker_name(i)).remote(plan.config, options.damage_version)
        for i in range(options.rollouts)
    ]
    saving = Saving(options.out.absolute() / "checkpoints", options.checkpoint_every)
    trainer = make_trainer.remote(plan, len(workers), saving, options.timeout)
    processes = [_patiently(actor.process, options.timeout) for actor in (trainer, *workers)]
    print(f"trainer: process {processes[0]}; rollouts: processes {', '.join(map(str, processes[1:]))}", flush=True)

    records = _patiently(trainer.records, options.timeout)
    if records:
        print(f"going on after iteration {len(records)}", flush=True)
    with Progress(plan.iterations) as progress:
        ended = time.monotonic()  # the latest iteration
        while len(records) < plan.iterations:
            try:
                # The trainer waits one timeout for its workers, and needs time to learn.
                record = answer_of(trainer.step.remote(), 2 * options.timeout)
            except PeerLost as error:
                if time.monotonic() - ended > LONGEST * options.timeout:
                    raise TrainerLost(f"no iteration ended in {LONGEST * options.timeout:g} s: {error}") from error
                if isinstance(error, PeerTimeout):
                    ray.kill(trainer, no_restart=False)
                records = _patiently(trainer.records, options.timeout)
                print(f"the trainer was lost; going on after iteration {len(records)}: {error}", flush=True)
                continue
            # If Ray has restarted the trainer since the last call, this iteration follows its checkpoint.
            records = [*records[: record["version"] - 1], record]
            progress.show(record)
            ended = time.monotonic()
    with contextlib.suppress(PeerLost):  # the records are here
        answer_of(trainer.close.remote(), options.timeout)
    return records


def _patiently(method: Any, timeout: float) -> Any:
    """The answer of an actor's method, however often the actor dies. Raises TrainerLost after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return answer_of(method.remote(), max(left, RETRY))
        except PeerLost as error:
            if left <= 0:
                raise TrainerLost(f"no actor answers for {timeout:g} s: {error}") from error
            time.sleep(RETRY)
