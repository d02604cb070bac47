"""Group-relative policy optimisation: rewards compared within the answers to one prompt, ratios clipped.

Source: "DeepSeekMath", arXiv 2402.03300, section 4.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlowprec as jlp
from rl.policies import AnyPolicy
from rl.policy import of_next


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of GRPO.

    Attributes:
        prompts, answers: prompts per iteration, and answers per prompt, which are compared with each other.
        updates: optimizer steps on an iteration's answers.
        learning_rate: Adam's initial rate; it falls to a tenth.
        clip: how far a ratio of probabilities may be from 1 before it is clipped.
        kl: weight of the divergence from the initial policy; 0: it is not computed.
        importance: "none", "truncated" or "masked": the weights of tokens by the ratio of their probabilities under the
            trainer and the rollout, see `jaxlowprec.rl`.
        importance_per: what a ratio is of: "token", "sequence" or "sequence_mean".
    """

    prompts: int = 16
    answers: int = 16
    updates: int = 2
    learning_rate: float = 2e-3
    clip: float = 0.2
    kl: float = 0.0
    importance: str = "none"
    importance_per: str = "token"

    @property
    def sequences(self) -> int:
        """The number of sequences of an iteration."""
        return self.prompts * self.answers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experience:
    """The data that an iteration learns from. A pytree.

    Attributes:
        tokens: int32 [sequences, length].
        answer: bool [sequences, length - 1]: which of tokens[:, 1:] the policy wrote.
        old: float32 [sequences, length - 1], the log-probabilities of tokens[:, 1:] when they were written.
        advantages: float32 [sequences].
        tape: the routing when they were written.
        reference: the initial policy's log-probabilities, like `old`; None if the divergence is not computed.
        weights: float32 [sequences, length - 1], what tokens' losses are multiplied by; None: nothing.
    """

    tokens: jax.Array
    answer: jax.Array
    old: jax.Array
    advantages: jax.Array
    tape: jlp.moe.RoutingTape
    reference: jax.Array | None = None
    weights: jax.Array | None = None


def importance(trainer: jax.Array, rollout: np.ndarray, answer: np.ndarray, settings: Settings) -> jax.Array | None:
    """The importance weights of tokens by their log-probabilities [sequences, length - 1]; None with "none"."""
    weigh = {"none": None, "truncated": jlp.rl.truncated_weights, "masked": jlp.rl.masked_weights}[settings.importance]
    return None if weigh is None else weigh(trainer, rollout, answer, per=settings.importance_per)


def advantages(rewards: np.ndarray, answers: int) -> np.ndarray:
    """Rewards [sequences] minus their group's mean, over its standard deviation; a prompt's answers are neighbours.

    >>> advantages(np.asarray([0.0, 1.0, 0.5, 0.5]), answers=2).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    groups = rewards.reshape(-1, answers)
    centred = groups - groups.mean(axis=1, keepdims=True)
    deviation = groups.std(axis=1, keepdims=True)
    return np.where(deviation > 0, centred / np.where(deviation > 0, deviation, 1), 0).reshape(-1).astype(np.float32)


def objective(model: AnyPolicy, given: Experience, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """The loss that is trained, and the log-probabilities that this pass found, [sequences, length - 1]."""
    found, _, load_balance_loss = model(given.tokens, given.tape)
    new = of_next(found, given.tokens)
    return surrogate(new, given, settings) + load_balance_loss, new


def surrogate(new: jax.Array, given: Experience, settings: Settings) -> jax.Array:
    """GRPO's loss for log-probabilities `new` [sequences, length - 1]: the mean over tokens that the policy wrote."""
    ratio = jnp.exp(new - given.old)
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    worth = given.advantages[:, None]
    loss = -jnp.minimum(ratio * worth, clipped * worth)
    if given.reference is not None:
        apart = given.reference - new
        loss = loss + settings.kl * (jnp.exp(apart) - apart - 1)
    if given.weights is not None:
        loss = loss * given.weights
    return jnp.sum(jnp.where(given.answer, loss, 0)) / jnp.sum(given.answer)


def optimizer(settings: Settings, iterations: int) -> optax.GradientTransformation:
    """Adam with a rate that falls along a cosine, and gradients clipped at norm 1."""
    rate = optax.cosine_decay_schedule(settings.learning_rate, iterations * settings.updates, alpha=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


@nnx.jit(static_argnames="settings")
def update(model: AnyPolicy, state: nnx.Optimizer, given: Experience, settings: Settings) -> tuple[Any, Any]:
    """Takes one step of the optimizer; returns the loss before it, and the log-probabilities of `objective`."""
    (loss, new), gradients = nnx.value_and_grad(objective, has_aux=True)(model, given, settings)
    state.update(model, gradients)
    return loss, new
