"""Pieces of tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """The first row is the heading."""
    heading, *others = [list(row) for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heading, ["---"] * len(heading), *others])


def milliseconds(seconds: float) -> str:
    """Three digits or more."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def share(part: float) -> str:
    """In percent; all only if it is all."""
    return "all" if part == 1 else f"{min(100 * part, 99.9):.1f} %"


def mebibytes(count: float) -> str:
    """With one decimal."""
    return f"{count / 2**20:,.1f}"
