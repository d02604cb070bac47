"""JSON in checkpoint files: JSON that is ambiguous, or that other programs read differently, is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError, brief

MAX_DEPTH = 100
"""The most levels of nested lists and objects; configs have four or five."""

_NESTED = (list, dict)


def load_json(where: str, text: bytes, *, finite: bool = False) -> Any:
    """Parses UTF-8 JSON; refuses repeated names, numbers that JSON does not have, and deep nesting.

    Arguments:
        where: the place, for errors.
        text: the whole JSON text.
        finite: refuse numbers beyond float64, which otherwise become infinite.

    Raises:
        CheckpointError: the text is not such JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{where}: {brief(repeated(name for name, _ in pairs))} is given twice")
        return found

    def no_constant(name: str) -> None:
        raise CheckpointError(f"{where}: {name} is not valid JSON")

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)) and finite:
            raise CheckpointError(f"{where}: the number {brief(digits)} is larger than float64 holds")
        return value

    try:
        decoded = text.decode("utf-8")
        loaded = json.loads(decoded, object_pairs_hook=unique, parse_constant=no_constant, parse_float=number)
        if _deeper(loaded, MAX_DEPTH):
            raise CheckpointError(f"{where}: is nested more than {MAX_DEPTH} deep")
        json.dumps(loaded, ensure_ascii=False).encode()  # half of a surrogate pair is not valid text
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON in UTF-8 ({type(error).__name__}: {error})") from None
    return loaded


def repeated(names: Iterable[str]) -> str | None:
    """The first name that appears twice, or None.

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
    """Whether lists and objects are nested more than `depth` times; checked level by level, without recursion."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(depth):
        level = [c for v in level for c in (v.values() if isinstance(v, dict) else v) if isinstance(c, _NESTED)]
    return bool(level)
