"""The programs of a page, piece by piece, each with the text that the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, NamedTuple

from tests.package.test_readme import ROOT

_PIECE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
_NUMBER = re.compile(r"(-?\d+\.\d*)")


class Piece(NamedTuple):
    """A block of Python, its line in the page, and the output shown below it; "" where none is."""

    code: str
    line: int
    shown: str


def pieces(page: str) -> list[Piece]:
    """Of a page, in their order."""
    text = (ROOT / page).read_text()
    return [Piece(m[1], text[: m.start(1)].count("\n"), m[2] or "") for m in _PIECE.finditer(text)]


def printed_by(piece: Piece, page: str, names: dict[str, Any]) -> str:
    """Runs a piece after those before it, which left `names`. Errors carry the page's line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile("\n" * piece.line + piece.code, page, "exec"), names)
    return said.getvalue()


def differs(printed: str, shown: str) -> bool:
    """Whether a text is another than the page shows: decimal fractions may differ by 2 in their last digit.

    XLA adds up in another order on another processor. All else, integers included, is exact.
    """
    ours, theirs = _NUMBER.split(printed), _NUMBER.split(shown)
    if len(ours) != len(theirs) or ours[::2] != theirs[::2]:
        return True
    numbers = zip(ours[1::2], theirs[1::2], strict=True)
    return any(abs(float(a) - float(b)) > 2.01 * 0.1 ** len(b.partition(".")[2]) for a, b in numbers)
