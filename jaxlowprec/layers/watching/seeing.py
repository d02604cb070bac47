"""Blocks that see the call of each layer, so that no function may compute for several: `explain` of a Linen model."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_current: contextvars.ContextVar[bool] = contextvars.ContextVar("seeing", default=False)


@contextlib.contextmanager
def seeing_calls() -> Iterator[None]:
    """Within the block, blocks of layers call each of them."""
    token = _current.set(True)
    try:
        yield
    finally:
        _current.reset(token)


def calls_are_seen() -> bool:
    """Whether such a block has been entered."""
    return _current.get()
