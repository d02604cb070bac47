"""Writes to the command's streams, with characters that any terminal can show, and the progress of a command."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from jaxlowprec.checkpoints.conversion.jobs import Progress
from jaxlowprec.checkpoints.errors import CheckpointError, escaped

_WIDTH = 30
_LEAST_SECONDS = 0.1


def printable(text: str, stream: Any = None) -> str:
    r"""A line as a stream can show it: control characters, and characters that it cannot encode, are escaped.

    Names of tensors and files may contain control sequences that a terminal would execute.

    >>> printable("a\x1b[31mb\nc")
    'a\\x1b[31mb\\nc'
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return escaped(text).encode(encoding, "backslashreplace").decode(encoding)


def as_json(content: Any) -> list[str]:
    """Lines of JSON, with null in place of infinity and NaN, which JSON does not have."""
    return json.dumps(_finite(content), indent=2).split("\n")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def emit(lines: Iterable[str]) -> None:
    """Writes lines to standard output. If the reader of a pipe went away, nothing is reported.

    Raises:
        CheckpointError: standard output cannot be written to.
    """
    text = "".join(f"{printable(line, sys.stdout)}\n" for line in lines)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _leave_unread(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise CheckpointError(f"standard output: {error.strerror}") from None


def say(text: str) -> None:
    """Writes a line to standard error, if there is one."""
    show(f"{printable(text, sys.stderr)}\n")


def show(text: str) -> None:
    """Writes text to standard error unchanged. If that fails, work goes on."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # the terminal is gone, the disk is full, or the stream was closed
        with contextlib.suppress(OSError, ValueError):
            _leave_unread(sys.stderr)


def _leave_unread(stream: Any) -> None:
    """Discards what is left to write: otherwise Python would try again at its end, and fail."""
    unread = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(unread, stream.fileno())
    finally:
        os.close(unread)


class Bar:
    """Shows the bytes done on standard error, if that is a terminal."""

    def __init__(self):
        self._shown = -_LEAST_SECONDS

    def __call__(self, done: int, total: int, label: str) -> None:
        """See `jobs.Progress`."""
        now = time.monotonic()
        if now - self._shown < _LEAST_SECONDS and done < total:
            return
        self._shown = now
        share = done / total if total else 1.0
        filled = "#" * int(_WIDTH * share)
        end = "\n" if done >= total else ""
        show(f"\r{label} [{filled:{_WIDTH}}] {100 * share:3.0f} %  {readable(done)} of {readable(total)} {end}")


def bar(quiet: bool) -> Progress | None:
    """A progress bar if standard error is a terminal, otherwise None."""
    return None if quiet or sys.stderr is None or not sys.stderr.isatty() else Bar()


def readable(nbytes: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
