"""The rollout's process: receives versions of the weights over TCP, and writes answers with the one that it serves.

It has no parameters of its own, no recipe and no optimizer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlowprec.decoder import Generator
from jaxlowprec.weight_sync import Receiver, TcpReceiver
from rl.channel import Channel, Ended
from rl.policies import AnyPolicy, kept
from rl.policy import Config, Policy, afresh, of_next, scores
from rl.served import digests, served

FIRST_MESSAGE = 60.0
DAMAGED = ("blocks.0.qkv.kernel.data", "decoder.layers.0.self_attn.q_proj.kernel.data")


def main() -> None:
    """Runs the process. Its standard input is the channel to the trainer. Ends when the trainer says so, or is gone."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the trainer may use the same GPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the trainer, which ends this process
    try:
        channel = Channel(socket.socket(fileno=os.dup(0)), "the trainer")
    except OSError:
        sys.exit("rl_loop: --rollout is for the process that the trainer starts; leave it out")
    try:
        serve(channel)
    except Ended as error:
        print(f"rollout: {error}; ending as well", file=sys.stderr, flush=True)
        sys.exit(3)


def serve(channel: Channel) -> None:
    """Answers the trainer's requests, one after the other.

    The first message has the secret of this run, the policy's sizes and how long to wait for the next request. The
    threads of `TcpReceiver` receive the weights separately. Answers are written with a snapshot of them.
    """
    said, _ = channel.receive(timeout=FIRST_MESSAGE)
    config, timeout = Config(**said["config"]), said["timeout"]
    receiver = Receiver()
    writer, live = Writer(), 0
    with TcpReceiver(receiver, said["secret"], timeout=timeout) as listening:
        channel.send({"address": listening.address}, timeout=timeout)
        while True:
            request, arrays = channel.receive(timeout=timeout)
            if request["do"] == "end":
                return
            weights = receiver.weights
            if live != weights.version:
                damage = weights.version == said["damage_version"]
                writer.load(served(config, damaged(weights) if damage else weights))
                live = weights.version
            if request["do"] == "digests":
                channel.send({"version": live, "digests": digests(writer.model)}, timeout=timeout)
            else:
                written = writer.write(arrays["prompts"], request["seed"], live)
                channel.send({"version": live}, written, timeout=timeout)


class Writer:
    """Writes answers with the version of a policy that it was given last.

    Attributes:
        model: that version, with 4-bit kernels; None before the first one.
    """

    def __init__(self) -> None:
        self.model: AnyPolicy | None = None
        self._generator: Generator | None = None

    def load(self, model: AnyPolicy) -> None:
        """Writes with this version from now on; all have the same config."""
        self.model = model
        if isinstance(model, Policy):
            return
        if self._generator is None:
            self._generator = Generator(model.decoder, model.config.length, kept(model.config), routing=True)
        self._generator.load(model.decoder)

    def write(self, prompts: np.ndarray, seed: int, version: int) -> dict[str, np.ndarray]:
        """See `write`. A decoder keeps keys and values in a cache and runs each token once."""
        if self._generator is None:
            return write(self.model, prompts, seed, version)
        (count, begin), config = prompts.shape, self.model.config
        seeds = np.random.SeedSequence((seed, version)).generate_state(count).tolist()
        written = self._generator(prompts.tolist(), config.length - begin, temperature=1.0, seeds=seeds, stop=())
        log_probabilities = np.zeros((count, config.length - 1), np.float32)
        log_probabilities[:, begin - 1 :] = np.stack(written.log_probabilities)
        tokens = np.concatenate([prompts, np.asarray(written.tokens, np.int32)], axis=1)
        routed = np.stack(written.routed_experts)
        return {"tokens": tokens, "log_probabilities": log_probabilities, "routed_experts": routed}


def write(model: Policy, prompts: np.ndarray, seed: int, version: int) -> dict[str, np.ndarray]:
    """Writes answers to prompts, token by token, drawn with the policy's own probabilities.

    There is no cache of keys and values: each token is computed by a pass over all places, so that arrays always have
    one shape. Places that are not written yet are masked and add exact zeros.

    Arguments:
        model: the policy with 4-bit kernels.
        prompts: int32 [sequences, prompt].
        seed, version: determine the random draws.

    Returns:
        tokens: int32 [sequences, length].
        log_probabilities: float32 [sequences, length - 1], of each token except the first when it was written; zeros
            for the prompt.
        routed_experts: int32 [sequences, length - 1, layers, k], in SGLang's form: the experts of each token when it
            was run; the last token never is.
    """
    (count, begin), config = prompts.shape, model.config
    tokens = np.zeros((count, config.length), np.int32)
    tokens[:, :begin] = prompts
    log_probabilities = np.zeros((count, config.length - 1), np.float32)
    routed = np.zeros((count, config.length - 1, config.layers, config.top_k), np.int32)
    key = jax.random.fold_in(jax.random.key(seed), version)
    tape = afresh(config, count)
    for place in range(begin, config.length):
        found, used = scores(model, tokens, tape)
        tokens[:, place] = jax.random.categorical(jax.random.fold_in(key, place), found[:, place - 1])
        log_probabilities[:, place - 1] = of_next(found, jnp.asarray(tokens))[:, place - 1]
        new = slice(0 if place == begin else place - 1, place)
        routed[:, new] = np.asarray(used.experts)[:, :, new].transpose(1, 2, 0, 3)
    return {"tokens": tokens, "log_probabilities": log_probabilities, "routed_experts": routed}


def damaged(weights: Any) -> dict[str, Any]:
    """The same tensors, except that one 4-bit code is changed by one."""
    name = next(name for name in DAMAGED if name in weights)
    codes = np.array(weights[name])
    codes.reshape(-1)[0] ^= 1
    return {**weights, name: codes}
