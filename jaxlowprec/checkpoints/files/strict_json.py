"""JSON as files of a checkpoint may hold it: what is ambiguous, or is read differently elsewhere, is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError, brief

MAX_DEPTH = 100
"""Of lists and objects in each other: configs have four or five."""

_NESTED = (list, dict)


def load_json(where: str, text: bytes, *, finite: bool = False) -> Any:
    """JSON of UTF-8 text, with no name given twice, no numbers that JSON lacks, and no deep nesting.

    Arguments:
        where: for errors.
        text: of the whole.
        finite: refuse numbers beyond float64, which else are infinite.

    Raises:
        CheckpointError: it is not that.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{where}: {brief(repeated(name for name, _ in pairs))} is given twice")
        return found

    def no_constant(name: str) -> None:
        raise CheckpointError(f"{where}: {name} is no JSON")

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)) and finite:
            raise CheckpointError(f"{where}: the number {brief(digits)} is larger than float64 holds")
        return value

    try:
        decoded = text.decode("utf-8")
        loaded = json.loads(decoded, object_pairs_hook=unique, parse_constant=no_constant, parse_float=number)
        if _deeper(loaded, MAX_DEPTH):
            raise CheckpointError(f"{where}: is nested more than {MAX_DEPTH} deep")
        json.dumps(loaded, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON in UTF-8 ({type(error).__name__}: {error})") from None
    return loaded


def repeated(names: Iterable[str]) -> str | None:
    """The first name that comes again, or None.

    >>> repeated("abcb")
    'b'
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects stand in each other more than `depth` times; level by level, without recursion."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(depth):
        level = [c for v in level for c in (v.values() if isinstance(v, dict) else v) if isinstance(c, _NESTED)]
    return bool(level)
