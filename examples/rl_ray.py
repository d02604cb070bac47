"""The run of rl_loop.py on Ray: a trainer and rollout workers are actors, and Ray restarts those that die.

    pip install 'jaxlowprec[examples,ray]'
    python examples/rl_ray.py --rollouts 2 --out runs/rl_ray    # Ray on this machine, for this run
    RAY_ADDRESS=HOST:6379 python examples/rl_ray.py             # a cluster whose machines share repository and --out

The trainer puts each version of the 4-bit weights into Ray's object store once, in the buckets of
`jaxlowprec.weight_sync`. A worker reads them there and serves its old version until the new one is whole. Ray repeats
the calls that a dead actor leaves unanswered: a restarted worker gets the version and the prompts again, and a
restarted trainer continues from its checkpoint. The numbers are those of rl_loop.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import secrets
import tempfile
import time
import uuid
from typing import Any

import numpy as np
import rl_loop
from rl.checkpoints import Checkpoints
from rl.engine import Answers, RolloutLost
from rl.learning import Disagreement
from rl.policies import AnyPolicy
from rl.policy import RECIPE, Config
from rl.report import Progress
from rl.rollout import Writer, damaged
from rl.served import differing, digests, served
from rl.training import Plan, Training

import jaxlowprec as jlp
from jaxlowprec.weight_sync import Bucketizer, InProcess, Manifest, Receiver, Session, WeightSource

if "RAY_ADDRESS" not in os.environ:  # only processes with the token are served; "cluster" is more than loopback
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} | os.environ
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"} | os.environ
import ray  # noqa: E402 (it reads these variables when it is imported)

RESTARTED = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of the weights. Numbers increase within a life of the trainer; one after a restart repeats some."""

    number: int
    manifest: Manifest
    trainer: str


class Worker:
    """A rollout worker. In version `damage_version` it changes one 4-bit code of one weight, for tests."""

    def __init__(self, config: Config, damage_version: int | None = None):
        self._config, self._damage_version = config, damage_version
        self._receiver, self._trainer, self._writer = Receiver(), "", Writer()
        print(f"rollout: process {os.getpid()}", flush=True)

    def answer(self, version: Version, prompts: np.ndarray, rows: slice, seed: int, *buckets: Any) -> tuple[Any, ...]:
        """Answers some rows of an iteration's prompts; `buckets` are in the memory of the object store.

        All rows are computed: XLA may sum in another order for another shape, and random draws depend on the row.
        Returns the arrays of `rollout.write`, the digests of the live weights, and the id of this process.
        """
        if (self._trainer, self._receiver.version) != (version.trainer, version.number):
            self.receive(version, *buckets)
        written = self._writer.write(prompts, seed, version.number)
        return {name: array[rows] for name, array in written.items()}, digests(self._writer.model), os.getpid()

    def receive(self, version: Version, *buckets: Any) -> None:
        """Receives a version. Raises Refused, and keeps the old one, if it is damaged, incomplete or stale."""
        receiver = self._receiver if version.trainer == self._trainer else Receiver()
        with Session(InProcess(receiver), version=version.number) as session:
            session.send_buckets(version.manifest, buckets)
        self._receiver, self._trainer = receiver, version.trainer
        damage = version.number == self._damage_version
        self._writer.load(served(self._config, damaged(receiver.weights) if damage else receiver.weights))


class Workers:
    """Workers as one `rl.engine.Engine`. `processes` are those that wrote the latest answers."""

    def __init__(self, actors: list[Any], timeout: float):
        self._actors, self._timeout, self._trainer = actors, timeout, uuid.uuid4().hex
        self.processes: list[int] = []

    def push(self, policy: AnyPolicy, version: int) -> tuple[int, float]:
        """See `Engine`. Workers receive the version when they are asked."""
        started = time.perf_counter()
        exported = jlp.quantize_params(policy, RECIPE)
        source = WeightSource(exported)
        with Bucketizer().buckets(source, version) as buckets:
            self._buckets = [ray.put(bucket) for bucket in buckets]
        self._version, self._digests = Version(version, source.manifest, self._trainer), digests(exported)
        return source.manifest.nbytes, time.perf_counter() - started

    def generate(self, prompts: np.ndarray, seed: int, version: int) -> Answers:
        """See `Engine`. A worker that is silent for half of the timeout is killed, so that Ray restarts it.

        Raises:
            RolloutLost: a worker does not answer in time. Disagreement: its weights are not those that were sent.
        """
        ends = np.cumsum([0, *map(len, np.array_split(prompts, len(self._actors)))]).tolist()
        asked = [
            actor.answer.remote(self._version, prompts, slice(*rows), seed, *self._buckets)
            for actor, rows in zip(self._actors, itertools.pairwise(ends), strict=True)
        ]
        _, silent = ray.wait(asked, num_returns=len(asked), timeout=self._timeout / 2)
        for reference in silent:
            ray.kill(self._actors[asked.index(reference)], no_restart=False)
        try:
            arrays, theirs, self.processes = zip(*ray.get(asked, timeout=self._timeout / 2), strict=True)
        except ray.exceptions.GetTimeoutError:
            raise RolloutLost(f"generating: no answer from {len(silent)} workers in {self._timeout:g} s") from None
        for number, found in enumerate(theirs):
            if names := differing(self._digests, found):
                raise Disagreement(f"version {version}: rollout {number}: weights that differ: {', '.join(names)}")
        return Answers(version, **{name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]})

    def differing_weights(self, policy: AnyPolicy) -> list[str]:
        """See `Engine`. None differ, or `generate` would have raised an error."""
        return []


class Trainer:
    """The trainer. It continues from the latest checkpoint in `--out`, if there is one."""

    def __init__(self, plan: Plan, options: argparse.Namespace):
        self._plan, self._every, self._training = plan, options.checkpoint_every, Training(plan)
        self._checkpoints = Checkpoints(options.out.absolute() / "checkpoints")
        self._records = self._checkpoints.restore(self._training)
        self._workers = Workers([ray.get_actor(f"rollout {i}") for i in range(options.rollouts)], options.timeout)
        print(f"trainer: process {os.getpid()}, continues after iteration {len(self._records)}", flush=True)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of all iterations so far."""
        return self._records

    def record(self, version: int) -> dict[str, Any]:
        """Returns the record of an iteration, after it has run those that are missing since the checkpoint."""
        while (new := len(self._records) + 1) <= version:
            self._records.append(self._training.step(self._workers, new) | {"answered_by": self._workers.processes})
            if new % self._every == 0 or new == self._plan.iterations:
                self._checkpoints.save(self._training, self._records)
        return self._records[version - 1]

    def close(self) -> None:
        """Waits until the latest checkpoint is whole."""
        self._checkpoints.close()


def train(plan: Plan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains in actors. Returns the records of all iterations. Raises RolloutLost if one takes four timeouts."""
    with tempfile.TemporaryDirectory(prefix="rl_", ignore_cleanup_errors=True) as tmp, Progress(plan.iterations) as bar:
        local = {"num_cpus": options.rollouts + 1, "object_store_memory": 100 << 20, "include_dashboard": False}
        local |= {"address": "local", "_temp_dir": tmp}
        ray.init(**({} if "RAY_ADDRESS" in os.environ else local), logging_level="ERROR")
        try:
            worker, trainer = ray.remote(**RESTARTED)(Worker), ray.remote(**RESTARTED)(Trainer)
            workers = [  # noqa: F841 (an actor ends with its last handle)
                worker.options(name=f"rollout {i}").remote(plan.config, options.damage_version)
                for i in range(options.rollouts)
            ]
            trainer = trainer.remote(plan, options)
            records = ray.get(trainer.records.remote(), timeout=options.timeout)
            for version in range(len(records) + 1, plan.iterations + 1):
                records.append(ray.get(trainer.record.remote(version), timeout=4 * options.timeout))
                bar.show(records[-1])
            ray.get(trainer.close.remote(), timeout=options.timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise RolloutLost(f"the trainer did not answer in time: {error}") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            ray.shutdown()
    return records


def arguments() -> argparse.Namespace:
    """Parses and checks the command line: that of rl_loop.py, and the number of workers."""
    parser = rl_loop.options_of_a_run(__doc__)
    parser.add_argument("--rollouts", type=int, default=1, help="workers among which prompts are divided")
    parser.set_defaults(checkpoint_every=10)
    options = rl_loop.arguments(parser)
    if not 1 <= options.rollouts <= options.prompts:
        parser.error(f"--rollouts {options.rollouts}: needs 1 to --prompts, {options.prompts}")
    # A restarted process loads what the earlier one compiled.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.out.absolute() / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return options


if __name__ == "__main__":
    rl_loop.main(arguments(), train)
