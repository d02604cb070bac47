"""The rollout's process as the trainer sees it: started, synced, asked, ended."""

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

import numpy as np

import jaxlowprec as jlp
from jaxlowprec.weight_sync import PeerLost, TcpTransport, WeightSource, push
from rl.channel import Channel, Ended
from rl.policy import RECIPE, Config, Policy
from rl.served import digests

SCRIPT = pathlib.Path(__file__).parents[1] / "rl_loop.py"
PATIENCE = 10.0


class RolloutLost(Exception):
    """The rollout's process ended, or does not answer in time."""


class Stale(Exception):
    """Answers that another version of the weights wrote."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the rollout wrote, and by which version; its arrays are those of `rollout.write`."""

    version: int
    tokens: np.ndarray
    log_probabilities: np.ndarray
    routed_experts: np.ndarray


class Rollout:
    """A rollout in a process of its own. A context manager: at the end of its block the process has ended.

    The process is told a secret that is made for this run, over a socket that only these two have; no argument and no
    environment variable holds it.

    Arguments:
        config: of the policy.
        timeout: seconds that each wait for the other process may take, in both; it has to cover compiling.
        damage_version: None, or the version in which the rollout shall change one 4-bit code of one weight.

    Attributes:
        process: the rollout's.
        address: that it takes weights at.

    Raises:
        RolloutLost: in every method, when the process is gone or silent.
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

    def push(self, policy: Policy, version: int) -> tuple[int, float]:
        """Exports the policy in 4 bits and sends it. Gives the bytes that travelled and the seconds it took."""
        started = time.perf_counter()
        source = WeightSource(jlp.quantize_params(policy, RECIPE))
        with self._naming_its_end(f"syncing version {version}"):
            push(source, self._transport, version, timeout=self._timeout)
        return source.manifest.nbytes, time.perf_counter() - started

    def generate(self, prompts: np.ndarray, seed: int, version: int) -> Answers:
        """Answers to prompts [sequences, prompt], written by this version of the weights.

        Raises:
            Stale: they were written by another.
        """
        with self._naming_its_end("generating"):
            self._channel.send({"do": "generate", "seed": seed}, {"prompts": prompts}, timeout=self._timeout)
            said, arrays = self._channel.receive(timeout=self._timeout)
        if said["version"] != version:
            raise Stale(
                f"the rollout answered with version {said['version']}; needs {version}, which the log-probabilities "
                "are compared with: sync it first"
            )
        return Answers(said["version"], **arrays)

    def differing_weights(self, policy: Policy) -> list[str]:
        """Names of the rollout's live tensors that are not, to the bit, those that the policy is exported to."""
        with self._naming_its_end("comparing weights"):
            self._channel.send({"do": "digests"}, timeout=self._timeout)
            theirs = self._channel.receive(timeout=self._timeout)[0]["digests"]
        ours = digests(jlp.quantize_params(policy, RECIPE))
        return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))

    def close(self) -> None:
        """Ends the process: it is asked to, then made to."""
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
