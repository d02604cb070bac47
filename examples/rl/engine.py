"""The rollout's process as the trainer sees it: starts it, sends it weights, asks it for answers, ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

import jaxlowprec as jlp
from jaxlowprec.weight_sync import PeerLost, TcpTransport, WeightSource, push
from rl.channel import Channel, Ended
from rl.policies import AnyPolicy
from rl.policy import RECIPE, Config
from rl.served import differing, digests

SCRIPT = pathlib.Path(__file__).parents[1] / "rl_loop.py"
PATIENCE = 10.0


class RolloutLost(Exception):
    """A process of the run has ended, or does not answer in time."""


class Stale(Exception):
    """Answers that another version of the weights wrote."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """The rollout's answers, and the version that wrote them; the arrays are those of `rollout.write`."""

    version: int
    tokens: np.ndarray
    log_probabilities: np.ndarray
    routed_experts: np.ndarray


class Engine(Protocol):
    """What writes answers, as the trainer sees it."""

    def push(self, policy: AnyPolicy, version: int) -> tuple[int, float]:
        """Exports the policy in 4 bits and sends it. Returns the bytes of the version, and the seconds it took."""

    def generate(self, prompts: np.ndarray, seed: int, version: int) -> Answers:
        """Answers to prompts int32 [sequences, prompt], written by this version of the weights.

        Raises:
            Stale: another version wrote them.
        """

    def differing_weights(self, policy: AnyPolicy) -> list[str]:
        """Names of the engine's live tensors that differ in a bit from the exported policy's."""


class Rollout:
    """A rollout in a process of its own. A context manager: at the end of its block the process has ended.

    A secret is made for each run and sent over a socket that only the two processes have; no argument and no
    environment variable holds it.

    Arguments:
        config: the sizes of the policy.
        timeout: seconds that each process waits for the other; it has to cover compiling.
        damage_version: None, or the version in which the rollout changes one 4-bit code of one weight.

    Attributes:
        process: the rollout's process.
        address: the address at which it receives weights.

    Raises:
        RolloutLost: in every method, if the process is gone or silent.
    """

    def __init__(self, config: Config, timeout: float = 300.0, damage_version: int | None = None):
        self._config, self._timeout = config, timeout
        self._said = {"config": dataclasses.asdict(config), "timeout": timeout, "damage_version": damage_version}

    def __enter__(self) -> Rollout:
        secret = secrets.token_hex(32)
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen([sys.executable, str(SCRIPT), "--rollout"], stdin=theirs, stdout=2)
        self._channel = Channel(ours, "the rollout")
        try:
            with self._naming_its_end("starting"):
                self._channel.send({"secret": secret, **self._said}, timeout=self._timeout)
                host, port = self._channel.receive(timeout=self._timeout)[0]["address"]
            self.address, self._transport = f"{host}:{port}", TcpTransport(host, port, secret)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def push(self, policy: AnyPolicy, version: int) -> tuple[int, float]:
        """See `Engine`."""
        started = time.perf_counter()
        source = WeightSource(jlp.quantize_params(policy, RECIPE))
        with self._naming_its_end(f"syncing version {version}"):
            push(source, self._transport, version=version, timeout=self._timeout)
        return source.manifest.nbytes, time.perf_counter() - started

    def generate(self, prompts: np.ndarray, seed: int, version: int) -> Answers:
        """See `Engine`."""
        with self._naming_its_end("generating"):
            self._channel.send({"do": "generate", "seed": seed}, {"prompts": prompts}, timeout=self._timeout)
            said, arrays = self._channel.receive(timeout=self._timeout)
        if said["version"] != version:
            raise Stale(
                f"the rollout answered with version {said['version']}; needs {version}, which the log-probabilities "
                "are compared with: sync it first"
            )
        return Answers(said["version"], **arrays)

    def differing_weights(self, policy: AnyPolicy) -> list[str]:
        """See `Engine`."""
        with self._naming_its_end("comparing weights"):
            self._channel.send({"do": "digests"}, timeout=self._timeout)
            theirs = self._channel.receive(timeout=self._timeout)[0]["digests"]
        return differing(digests(jlp.quantize_params(policy, RECIPE)), theirs)

    def close(self) -> None:
        """Ends the process: asks it to end, and kills it if it does not."""
        with contextlib.suppress(Ended):
            self._channel.send({"do": "end"}, timeout=1)
        self._channel.close()
        for make_it in (lambda: None, self.process.terminate, self.process.kill):
            make_it()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
                return

    @contextlib.contextmanager
    def _naming_its_end(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (Ended, PeerLost) as error:
            state = "its process runs, but does not answer"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(1)
                state = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with {code}"
            raise RolloutLost(f"{doing}: {error}: {state}") from error
