"""Compares the log-probabilities of two passes, to the bit, and describes their differences."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of comparing two passes.

    Attributes:
        largest: the largest absolute difference; NaN if a log-probability is NaN.
        differing: how many differ in a bit, or are NaN.
        compared: how many were compared.
        first: (sequence, token) of the first that differs.
    """

    largest: float
    differing: int
    compared: int
    first: tuple[int, int] | None = None

    @property
    def exact(self) -> bool:
        """Whether all have the same bits, and none is NaN."""
        return self.differing == 0

    def __str__(self) -> str:
        if self.exact:
            return f"{self.compared} log-probabilities with the same bits"
        sequence, token = self.first
        return (
            f"{self.differing} of {self.compared} log-probabilities differ, by up to {self.largest:.3g}; "
            f"the first is that of token {token} of sequence {sequence}"
        )


def compare(one: np.ndarray, other: np.ndarray, where: np.ndarray) -> Agreement:
    """Compares log-probabilities of tokens 1, 2, ..., float32 [sequences, length - 1], where the bool `where` is True.

    Bits are compared, so zeros of different sign differ. A NaN differs from everything.

    Raises:
        ValueError: dtypes other than float32, different shapes, or nothing to compare.

    >>> a = np.zeros((1, 3), np.float32)
    >>> print(compare(a, a + np.float32([0, 0, 0.5]), np.ones((1, 3), bool)))
    1 of 3 log-probabilities differ, by up to 0.5; the first is that of token 3 of sequence 0
    """
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != np.float32 or other.dtype != np.float32 or not one.shape == other.shape == where.shape:
        raise ValueError(
            f"compare: {one.dtype} {one.shape} and {other.dtype} {other.shape} where {where.shape}; needs float32 of "
            "one shape"
        )
    if not where.any():
        raise ValueError("compare: where is False everywhere; needs one number or more to compare")
    differ = ((one.view(np.uint32) != other.view(np.uint32)) | np.isnan(one)) & where
    largest = np.max(np.abs(one - other), where=where, initial=0.0)
    first = tuple(int(i) for i in np.argwhere(differ)[0]) if differ.any() else None
    return Agreement(float(largest), int(differ.sum()), int(where.sum()), first and (first[0], first[1] + 1))
