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
from rl.grpo import Experience, Settings, advantages, importance, update
from rl.policies import AnyPolicy, trained
from rl.policy import RECIPE, afresh, of_next, scores
from rl.task import Task

BOUNDS = {"float32": 1e-4}
"""The largest difference of log-probabilities by the dtype of a decoder's cache. Others have no bound: where a sum's
last bit differs, a number may get the next code."""


class Disagreement(Exception):
    """The rollout's log-probabilities are not the trainer's, or its weights are not."""


def replay(policy: AnyPolicy, answers: Answers) -> tuple[jlp.moe.RoutingTape, jax.Array]:
    """The rollout's routing as a checked tape, and the log-probabilities that the trainer finds with it.

    It is the forward pass of training, which quantises the float32 master weights when it multiplies by them, and keys
    and values of a decoder before attention reads them.
    """
    config = policy.config
    tape = jlp.moe.RoutingTape.from_routed_experts(
        list(answers.routed_experts), num_layers=config.layers, k=config.top_k, num_experts=config.experts
    )
    with trained(config):
        found, _ = scores(policy, answers.tokens, tape)
    return tape, of_next(found, jnp.asarray(answers.tokens))


def check(agreement: Agreement, version: int, policy: AnyPolicy, engine: Engine) -> None:
    """Raises Disagreement, with the differences, unless the log-probabilities are the same to the bit.

    A decoder's rollout attends to a cache, and XLA adds up attention in another order then: its weights have to be the
    same to the bit, and its log-probabilities within `BOUNDS`.
    """
    if agreement.exact:
        return
    names = engine.differing_weights(policy)
    bound = BOUNDS.get(policy.config.cache, np.inf)
    if policy.config.kind != "small" and not names and agreement.largest <= bound:
        return
    weights = f"weights that differ: {', '.join(names)}" if names else "the weights are the same to the bit"
    raise Disagreement(f"version {version}: train_rollout_logprob_abs_diff is not 0: {agreement}; {weights}")


def learn(
    policy: AnyPolicy,
    state: nnx.Optimizer,
    answers: Answers,
    task: Task,
    settings: Settings,
    engine: Engine,
    initial: AnyPolicy | None,
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
        importance(old, answers.log_probabilities, written, settings),
    )
    measured = jlp.rl.mismatch(old, answers.log_probabilities, written)
    of_cache = {} if policy.config.kind == "small" else cache_measures(policy, answers, tape, old, written)
    with trained(policy.config):
        losses, passes = zip(*(update(policy, state, given, settings) for _ in range(settings.updates)), strict=True)
    return {
        "version": answers.version,
        "reward": float(rewards.mean()),
        "right": float((rewards == 1).mean()),
        "loss": float(losses[0]),
        "train_rollout_logprob_abs_diff": agreement.largest,
        "mismatch": measured.to_json(),
        **of_cache,
        "kept": float(np.mean(given.weights[written] > 0)) if given.weights is not None else 1.0,
        "differing": agreement.differing,
        "compared": agreement.compared,
        "gradient_pass_logprob_abs_diff": compare(passes[0], old, written).largest,
        "unquantised_logprob_abs_diff": compare(unquantised, old, written).largest,
        "routing_same": same_before,
        "routing_same_after": routing_agreement(policy, answers.tokens, tape),
        "learn_ms": 1e3 * (time.perf_counter() - started),
    }


def cache_measures(
    policy: AnyPolicy, answers: Answers, tape: jlp.moe.RoutingTape, old: jax.Array, written: np.ndarray
) -> dict[str, Any]:
    """The mismatch if the trainer did not read keys and values as the cache keeps them, and how many log-probabilities
    `old`, for which it did, differ by more than a float32 cache may."""
    with jlp.autocast(RECIPE):
        plain = of_next(scores(policy, answers.tokens, tape)[0], jnp.asarray(answers.tokens))
    far = np.abs(np.asarray(old) - answers.log_probabilities) > BOUNDS["float32"]
    return {
        "plain_cache_mismatch": jlp.rl.mismatch(plain, answers.log_probabilities, written).summary(),
        "beyond_float32": int(far[written].sum()),
    }


def routing_agreement(policy: AnyPolicy, tokens: np.ndarray, tape: jlp.moe.RoutingTape) -> float:
    """The share of tokens, over all layers, for which the policy would choose the tape's experts in its order."""
    with trained(policy.config):
        _, fresh = scores(policy, tokens, afresh(policy.config, len(tokens)))
    return float(np.mean(jlp.moe.overlap(fresh, tape).same_order))
