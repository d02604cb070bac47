"""Version numbers, as callers, engines and folders give them."""

from __future__ import annotations

import operator

from jaxlowprec.weight_sync.bucket import MAX_VERSION
from jaxlowprec.weight_sync.errors import Refused

_SHOWN = 40  # characters shown of a text that is not a version


def whole_number(version: object) -> int | None:
    """An integer of any type, such as numpy's and JAX's; None for anything else, True and False included.

    >>> import numpy as np
    >>> whole_number(np.int64(3)), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    if isinstance(version, bool):
        return None
    try:
        return operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        return None


def newer(version: object, than: int, state: str = "served") -> int:
    """The number of a version that may begin.

    Arguments:
        version: the announced version.
        than: the newest version.
        state: what is done with that version, for the error.

    Raises:
        Refused: it is not newer, not a whole number, or larger than 2^63 - 1.

    >>> newer(3, than=7)
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.Refused: begin: version 3 is stale; 7 is served, and versions increase
    """
    number = whole_number(version)
    if number is None:
        given = f"{version!r}"[:_SHOWN]
        raise Refused(f"begin: version {given} is stale or not a number; needs a whole number above {than}")
    if number > MAX_VERSION:
        raise Refused(f"begin: a version of {number.bit_length()} bits; needs at most {MAX_VERSION}")
    if number <= than:
        raise Refused(f"begin: version {number} is stale; {than} is {state}, and versions increase")
    return number


def said_version(said: str) -> int:
    """The version that an engine says it serves; 0 for text that is not a number, such as an engine's own name for it.

    Raises:
        Refused: the number cannot be a version.

    >>> said_version("12"), said_version("default")
    (12, 0)
    """
    if not (said.isascii() and said.isdigit()):
        return 0
    digits = said.lstrip("0")
    if len(digits) > len(str(MAX_VERSION)) or int(digits or "0") > MAX_VERSION:
        raise Refused(
            f"version: the engine says that it serves {said[:_SHOWN]}... ({len(said)} digits); versions are at most "
            f"{MAX_VERSION}; restart it"
        )
    return int(digits or "0")
