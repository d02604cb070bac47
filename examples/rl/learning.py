"""An iteration's learning: the trainer's own log-probabilities with the rollout's routing, compared, then GRPO."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlowprec as jlp
from rl.agreement import Agreement, compare
from rl.engine import Answers, Engine
from rl.grpo import Experience, Settings, advantages, update
from rl.policy import RECIPE, Policy, afresh, of_next, scores
from rl.task import Task


class Disagreement(Exception):
    """The rollout's log-probabilities are not the trainer's."""


def replay(policy: Policy, answers: Answers) -> tuple[jlp.moe.RoutingTape, jax.Array]:
    """The rollout's routing as a checked tape, and the log-probabilities that the trainer finds with it.

    It is the forward pass of training, which quantises the float32 master weights when it multiplies by them.
    """
    config = policy.config
    tape = jlp.moe.RoutingTape.from_routed_experts(
        list(answers.routed_experts), num_layers=config.layers, k=config.top_k, num_experts=config.experts
    )
    with jlp.autocast(RECIPE):
        found, _ = scores(policy, answers.tokens, tape)
    return tape, of_next(found, jnp.asarray(answers.tokens))


def check(agreement: Agreement, version: int, policy: Policy, engine: Engine) -> None:
    """Raises Disagreement, with the differences, unless the log-probabilities are the same to the bit."""
    if agreement.exact:
        return
    names = engine.differing_weights(policy)
    weights = f"weights that differ: {', '.join(names)}" if names else "the weights are the same to the bit"
    raise Disagreement(f"version {version}: train_rollout_logprob_abs_diff is not 0: {agreement}; {weights}")


def learn(
    policy: Policy,
    state: nnx.Optimizer,
    answers: Answers,
    task: Task,
    settings: Settings,
    engine: Engine,
    initial: Policy | None,
) -> dict[str, Any]:
    """Replays the routing, checks the bits, and takes the optimizer's steps. Returns the iteration's record.

    Arguments:
        engine: is asked about its weights if log-probabilities differ.
        initial: the policy before training, if the settings need the divergence from it; otherwise None.

    Raises:
        Disagreement: log-probabilities differ; nothing was learned then.
    """
    started = time.perf_counter()
    tape, old = replay(policy, answers)
    written = np.zeros(old.shape, bool)
    written[:, task.prompt - 1 :] = True
    agreement = compare(old, answers.log_probabilities, written)
    check(agreement, answers.version, policy, engine)

    same_before = routing_agreement(policy, answers.tokens, tape)
    with jlp.autocast(enabled=False):  # the difference if the trainer did not quantise
        unquantised = of_next(scores(policy, answers.tokens, tape)[0], jnp.asarray(answers.tokens))
    rewards = task.reward(answers.tokens)
    given = Experience(
        jnp.asarray(answers.tokens),
        jnp.asarray(written),
        old,
        jnp.asarray(advantages(rewards, settings.answers)),
        tape,
        None if initial is None else replay(initial, answers)[1],
    )
    with jlp.autocast(RECIPE):
        losses, passes = zip(*(update(policy, state, given, settings) for _ in range(settings.updates)), strict=True)
    return {
        "version": answers.version,
        "reward": float(rewards.mean()),
        "right": float((rewards == 1).mean()),
        "loss": float(losses[0]),
        "train_rollout_logprob_abs_diff": agreement.largest,
        "differing": agreement.differing,
        "compared": agreement.compared,
        "gradient_pass_logprob_abs_diff": compare(passes[0], old, written).largest,
        "unquantised_logprob_abs_diff": compare(unquantised, old, written).largest,
        "routing_same": same_before,
        "routing_same_after": routing_agreement(policy, answers.tokens, tape),
        "learn_ms": 1e3 * (time.perf_counter() - started),
    }


def routing_agreement(policy: Policy, tokens: np.ndarray, tape: jlp.moe.RoutingTape) -> float:
    """The share of tokens, over all layers, for which the policy would choose the tape's experts in its order."""
    with jlp.autocast(RECIPE):
        _, fresh = scores(policy, tokens, afresh(policy.config, len(tokens)))
    return float(np.mean(jlp.moe.overlap(fresh, tape).same_order))
