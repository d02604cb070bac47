"""Checks of what a generator is asked for. Every message says what was given and what is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlowprec.arguments import shown, whole_number

COLDEST = 1e-6
"""The smallest temperature above 0: quotients of logits by a smaller one may be infinite."""


def token_rows(who: str, prompts: Any, vocabulary: int, places: int, count: int = 0) -> list[np.ndarray]:
    """The tokens of each prompt, which have room for `count` more.

    Raises:
        TypeError: they are no tokens.
        ValueError: there are none, they are outside of the vocabulary, or too many.

    >>> token_rows("example", [[1, 5], [2]], vocabulary=8, places=4)
    [array([1, 5]), array([2])]
    >>> token_rows("example", [1, 5], vocabulary=8, places=4)
    Traceback (most recent call last):
    TypeError: example: prompts[0]=1; needs a list of tokens, which are ints, for each sequence, such as [[1, 5], [2]]
    """
    if hasattr(prompts, "ndim"):  # an array: its rows would come from the device one by one
        prompts = np.asarray(prompts)
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, np.ndarray) and not prompts.ndim:
        raise TypeError(f"{who}: prompts={shown(prompts)}; needs a list of lists of tokens, such as [[1, 5], [2]]")
    rows = [_row(who, i, prompt) for i, prompt in enumerate(prompts)]
    if not rows or not all(map(len, rows)):
        raise ValueError(f"{who}: needs a prompt or more, of one token or more each")
    if min(row.min() for row in rows) < 0 or max(row.max() for row in rows) >= vocabulary:
        raise ValueError(f"{who}: prompts have tokens outside of the vocabulary, 0 to {vocabulary - 1}")
    longest = max(map(len, rows))
    if longest + count > places:
        more = f" and count={count} more" if count else ""
        raise ValueError(
            f"{who}: a prompt of {longest} tokens{more}; there are places={places}: shorten them, or make a Generator "
            "with more places"
        )
    return rows


def _row(who: str, i: int, prompt: Any) -> np.ndarray:
    try:
        row = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        row = np.asarray(None)
    if row.ndim == 1 and (row.dtype.kind in "iu" or not row.size):
        return row
    raise TypeError(
        f"{who}: prompts[{i}]={shown(prompt)}; needs a list of tokens, which are ints, for each sequence, such as "
        "[[1, 5], [2]]"
    )


def number_of_tokens(who: str, count: Any) -> int:
    """How many tokens are wanted. Raises TypeError, ValueError."""
    return whole_number(who, "count", count, 1)


def temperature_of(who: str, temperature: Any) -> float:
    """A temperature. Raises TypeError, ValueError.

    >>> temperature_of("example", 1e-40)
    Traceback (most recent call last):
    ValueError: example: temperature=1e-40; needs 0, for the most likely token, or 1e-06 or more
    """
    try:
        if isinstance(temperature, str):
            raise TypeError
        number = float(temperature)
    except (TypeError, ValueError):
        raise TypeError(f"{who}: temperature={shown(temperature)}; needs a number") from None
    if not number >= 0:
        raise ValueError(f"{who}: temperature={number}; needs 0 or more")
    if 0 < number < COLDEST:
        raise ValueError(f"{who}: temperature={number}; needs 0, for the most likely token, or {COLDEST} or more")
    return number


def seeds_of(who: str, seeds: Any, prompts: int) -> np.ndarray:
    """The seed of each prompt; None: 0, 1, ... Raises TypeError, ValueError."""
    found = np.arange(prompts) if seeds is None else np.asarray(seeds)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{who}: seeds={shown(seeds)}; needs an int for each prompt")
    if len(found) != prompts:
        raise ValueError(f"{who}: {len(found)} seeds for {prompts} prompts; needs one each")
    if found.min() < 0 or found.max() >= 2**32:
        raise ValueError(f"{who}: seeds={shown(seeds)}; needs ints from 0 to {2**32 - 1}")
    return found.astype(np.uint32)


def stops_of(who: str, stop: Any) -> tuple[int, ...]:
    """The tokens that end a text. Raises TypeError."""
    found = np.asarray(stop)
    if found.ndim == 1 and (found.dtype.kind in "iu" or not found.size):
        return tuple(found.tolist())
    raise TypeError(f"{who}: stop={shown(stop)}; needs a list of tokens, such as [2]")
