"""Rollout workers as the trainer sees them: one engine, whose workers may die and come back at any time."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
import uuid
from typing import Any

import numpy as np
import ray

import jaxlowprec as jlp
from jaxlowprec.weight_sync import PeerTimeout, Session, SyncError, WeightSource
from rl.engine import Answers, RolloutLost, Stale
from rl.learning import Disagreement
from rl.on_ray.transport import ObjectStoreTransport, Published, answer_of, publish
from rl.on_ray.worker import Part, Question, digest_of
from rl.policies import AnyPolicy
from rl.policy import RECIPE
from rl.served import digests

RETRY = 0.1  # seconds between two attempts to reach a worker


@dataclasses.dataclass
class _Peer:
    """A worker: its actor, the transport to it, and the version that it is known to serve."""

    number: int
    actor: Any
    transport: ObjectStoreTransport
    version: int | None = None


class _Asked:
    """The questions of an iteration: waiting, with a worker, or answered."""

    def __init__(self, questions: list[Question]):
        self.waiting = collections.deque(questions)
        self.parts: dict[int, tuple[_Peer, Part]] = {}
        self.count = len(questions)
        self.failed: BaseException | None = None
        self.last_error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.failed is not None or len(self.parts) == self.count


class Rollouts:
    """Workers that answer an iteration's prompts together. See `rl.engine.Engine`.

    A thread for each worker brings it the newest version and asks it questions. A question of a worker that dies goes
    back to the others, and the thread tries to reach the worker until Ray has restarted it.

    Arguments:
        actors: handles of `Worker` actors, which Ray restarts.
        timeout: seconds without any answer after which the workers count as lost. One that is silent for half of that
            is killed, so that it is restarted.

    Attributes:
        published_digest: `digest_of` the latest version, before it was sent.
        answered_by: for each part of the last iteration its worker, that one's process, and the digest of the weights
            that wrote the answers.

    Raises:
        RolloutLost: in `generate` and `differing_weights`, if no worker answers in time.
    """

    def __init__(self, actors: list[Any], timeout: float):
        self._timeout, trainer = timeout, uuid.uuid4().hex
        self._peers = [_Peer(i, actor, ObjectStoreTransport(actor, trainer)) for i, actor in enumerate(actors)]
        self._changed = threading.Condition()
        self._published: Published | None = None
        self.published_digest = ""
        self._asked = _Asked([])
        self.answered_by: list[dict[str, Any]] = []
        for peer in self._peers:
            threading.Thread(target=self._work, args=(peer,), name=f"rollout {peer.number}", daemon=True).start()

    def push(self, policy: AnyPolicy, version: int) -> tuple[int, float]:
        """See `Engine`. Ends when the version is in the object store; each worker receives it as soon as it can."""
        started = time.perf_counter()
        exported = jlp.quantize_params(policy, RECIPE)
        source = WeightSource(exported)
        published = publish(source, version)
        with self._changed:
            self._published, self._asked = published, _Asked([])
            self.published_digest = digest_of(digests(exported))
            self._changed.notify_all()
        return source.manifest.nbytes, time.perf_counter() - started

    def generate(self, prompts: np.ndarray, seed: int, version: int) -> Answers:
        """See `Engine`.

        Raises:
            Disagreement: a worker's weights are not the trainer's.
        """
        asked = _Asked(divide(prompts, len(self._peers), seed, version))
        with self._changed:
            self._asked = asked
            self._changed.notify_all()
            while not asked.done:
                before = len(asked.parts)
                if not self._changed.wait_for(lambda: asked.done or len(asked.parts) > before, self._timeout):  # noqa: B023
                    raise RolloutLost(f"generating: no worker answered for {self._timeout:g} s: {asked.last_error}")
        if asked.failed is not None:
            raise asked.failed
        found = [asked.parts[begin] for begin in sorted(asked.parts)]
        self._check(found, version)
        self.answered_by = [
            {"worker": peer.number, "process": part.process, "weights_digest": part.digest} for peer, part in found
        ]
        names = found[0][1].arrays
        return Answers(version, **{name: np.concatenate([part.arrays[name] for _, part in found]) for name in names})

    def differing_weights(self, policy: AnyPolicy) -> list[str]:
        """See `Engine`; names that differ in any worker."""
        ours = digests(jlp.quantize_params(policy, RECIPE))
        differing: set[str] = set()
        try:
            for peer in self._peers:
                theirs = answer_of(peer.actor.serving.remote(), self._timeout).digests
                differing |= {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        except (SyncError, Stale) as error:
            raise RolloutLost(f"comparing weights: {error}") from error
        return sorted(differing)

    def _check(self, found: list[tuple[_Peer, Part]], version: int) -> None:
        """Raises Disagreement unless all answers were written with exactly the weights that were sent."""
        ours = self.published_digest
        for peer, part in found:
            if part.digest != ours:
                raise Disagreement(
                    f"version {version}: rollout {peer.number} answered with weights whose digest is "
                    f"{part.digest[:12]}, not {ours[:12]}"
                )

    def _work(self, peer: _Peer) -> None:
        """A worker's thread."""
        while True:
            asked, question = self._next(peer)
            try:
                if question is None:
                    self._bring(peer)
                    continue
                part = answer_of(peer.actor.answer.remote(question), self._timeout / 2)
            except (SyncError, Stale) as error:
                self._lost(peer, asked, question, error)
            except BaseException as error:  # the trainer's thread raises it
                with self._changed:
                    asked.failed = error
                    self._changed.notify_all()
            else:
                with self._changed:
                    asked.parts[question.begin] = peer, part
                    self._changed.notify_all()

    def _next(self, peer: _Peer) -> tuple[_Asked, Question | None]:
        """Waits for a question; None: the worker needs the newest version first."""
        with self._changed:
            while True:
                if self._published is not None and peer.version != self._published.version:
                    return self._asked, None
                if self._asked.waiting and not self._asked.done:
                    return self._asked, self._asked.waiting.popleft()
                self._changed.wait()

    def _bring(self, peer: _Peer) -> None:
        """Sends the newest version to a worker."""
        published = self._published
        assert published is not None
        with Session(peer.transport, version=published.version, timeout=self._timeout / 2) as session:
            session.send_buckets(published.manifest, published.buckets)
        peer.version = published.version

    def _lost(self, peer: _Peer, asked: _Asked, question: Question | None, error: Exception) -> None:
        """Gives a lost worker's question to the others, and forgets what the worker serves."""
        if peer.version is not None:
            doing = "receiving" if question is None else "answering"
            print(
                f"rollout {peer.number} was lost while {doing}; it gets the newest version when it is back: {error}",
                flush=True,
            )
        peer.version = None
        with self._changed:
            asked.last_error = error
            if question is not None:
                asked.waiting.append(question)
            self._changed.notify_all()
        if isinstance(error, PeerTimeout):
            ray.kill(peer.actor, no_restart=False)
        time.sleep(RETRY)


def divide(prompts: np.ndarray, workers: int, seed: int, version: int) -> list[Question]:
    """An iteration's prompts, int32 [sequences, prompt], in as many parts as there are workers, in order.

    >>> [question.rows for question in divide(np.zeros((5, 3), np.int32), workers=2, seed=0, version=1)]
    [slice(0, 3, None), slice(3, 5, None)]
    """
    begins = np.cumsum([0, *map(len, np.array_split(prompts, workers))])
    pairs = zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    return [Question(prompts[b:e], b, len(prompts), seed, version) for b, e in pairs if e > b]
