"""A rollout worker: an actor that receives versions of the weights and answers its part of the prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

import numpy as np

from rl.engine import Stale
from rl.on_ray.transport import Inbox
from rl.policy import Config
from rl.rollout import Writer, damaged
from rl.served import digests, served


@dataclasses.dataclass(frozen=True)
class Question:
    """A worker's part of an iteration's prompts.

    Attributes:
        prompts: int32 [rows, prompt].
        begin: the first one's place among all prompts of the iteration.
        sequences: the number of all prompts.
        seed, version: determine the random draws; the version's weights write the answers.
    """

    prompts: np.ndarray
    begin: int
    sequences: int
    seed: int
    version: int

    @property
    def rows(self) -> slice:
        """The part's places among all prompts."""
        return slice(self.begin, self.begin + len(self.prompts))


@dataclasses.dataclass(frozen=True)
class Part:
    """The answers to a question.

    Attributes:
        arrays: those of `rollout.write`, for the question's prompts only.
        process: the id of the process that wrote them.
        digest: `digest_of` the weights that wrote them.
    """

    arrays: dict[str, np.ndarray]
    process: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a worker serves.

    Attributes:
        version, digests: the version, and the digests of its tensors by their names.
        state: "receiving" while the worker has a part of the next version; otherwise "paused" or "serving".
    """

    version: int
    digests: dict[str, str]
    state: str


class Worker:
    """The actor. Ray runs its methods one after the other, so that no version comes while answers are written.

    Arguments:
        config: the sizes of the policy.
        damage_version: None, or the version in which it changes one 4-bit code of one weight.
    """

    def __init__(self, config: Config, damage_version: int | None = None):
        self._config, self._damage_version = config, damage_version
        self._inbox = Inbox()
        self._writer, self._live = Writer(), None

    def process(self) -> int:
        """The id of the actor's process."""
        return os.getpid()

    def sync(self, trainer: str, verb: str, *arguments: Any) -> Any:
        """See `Inbox.carry_out`."""
        return self._inbox.carry_out(trainer, verb, *arguments)

    def answer(self, question: Question) -> Part:
        """Writes answers, the same ones in whatever parts the prompts come.

        The arrays of a pass have the shape of the whole iteration, in which the rows of other parts are blank: XLA may
        sum in another order for another shape, and random draws depend on the row.

        Raises:
            Stale: another version, or none, is served.
        """
        writer = self._loaded()
        if self._inbox.weights.version != question.version:
            raise Stale(f"version {self._inbox.weights.version or None} is served; {question.version} is needed")
        prompts = np.zeros((question.sequences, question.prompts.shape[1]), np.int32)
        prompts[question.rows] = question.prompts
        written = writer.write(prompts, question.seed, question.version)
        arrays = {name: array[question.rows] for name, array in written.items()}
        return Part(arrays, os.getpid(), digest_of(digests(writer.model)))

    def serving(self) -> Serving:
        """What is served now. Raises Stale if there is no version yet."""
        writer = self._loaded()
        return Serving(self._inbox.weights.version, digests(writer.model), self._inbox.state)

    def _loaded(self) -> Writer:
        weights = self._inbox.weights
        if not weights.version:
            raise Stale("no version is served yet")
        if self._live is not weights:
            damage = weights.version == self._damage_version
            self._writer.load(served(self._config, damaged(weights) if damage else weights))
            self._live = weights
        return self._writer


def worker_name(number: int) -> str:
    """The name by which other actors of the run find a worker.

    >>> worker_name(0)
    'rollout 0'
    """
    return f"rollout {number}"


def digest_of(tensors: dict[str, str]) -> str:
    """One digest of the digests of a policy's tensors, which are given by their names.

    >>> digest_of({"a": "01", "b": "02"}) == digest_of({"b": "02", "a": "01"})
    True
    """
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()
