"""Reinforcement learning with an engine whose log-probabilities are not the trainer's: weights, and measures of it."""

from jaxlowprec.rl.importance import masked_weights, truncated_weights
from jaxlowprec.rl.measures import Mismatch, mismatch

__all__ = ["Mismatch", "masked_weights", "mismatch", "truncated_weights"]
