"""A task whose answers a program can check: writing down given digits in ascending order.

    3 1 3 0 =        the prompt
    0 1 3 3          the right answer

The reward of an answer is the share of its places with the right digit. The policy never sees anything else.
"""

from __future__ import annotations

import dataclasses

import numpy as np

DIGITS = 10
EQUALS = DIGITS
VOCABULARY = DIGITS + 1


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of sorting `digits` digits."""

    digits: int = 4

    @property
    def prompt(self) -> int:
        """Tokens of a prompt: the digits and the sign after them."""
        return self.digits + 1

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt + self.digits

    def prompts(self, count: int, seed: int, iteration: int) -> np.ndarray:
        """int32 [count, prompt]: the same for the same seed and iteration."""
        digits = np.random.default_rng((seed, iteration)).integers(0, DIGITS, (count, self.digits))
        return np.concatenate([digits, np.full((count, 1), EQUALS)], axis=1).astype(np.int32)

    def reward(self, tokens: np.ndarray) -> np.ndarray:
        """Rewards float32 [sequences] of tokens [sequences, length]: 1 if all digits are right, 0 if none is.

        >>> Task(digits=4).reward(np.asarray([[3, 1, 3, 0, EQUALS, 0, 1, 2, 3]])).tolist()
        [0.75]
        """
        right = np.sort(tokens[:, : self.digits], axis=1) == tokens[:, self.prompt :]
        return right.mean(axis=1, dtype=np.float32)
