"""What the command writes to its streams: every character as any terminal may show it, and errors in words."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError, escaped


def printable(text: str, stream: Any = None) -> str:
    r"""A line as a stream can show it: escapes in the place of what it has no letters for, and of control characters.

    Names of tensors and files may hold sequences that a terminal obeys.

    >>> printable("a\x1b[31mb\nc")
    'a\\x1b[31mb\\nc'
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return escaped(text).encode(encoding, "backslashreplace").decode(encoding)


def emit(lines: Iterable[str]) -> None:
    """Writes lines to standard output. Nothing is said where the reader of a pipe went away.

    Raises:
        CheckpointError: it cannot be written to.
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
    """Writes to standard error as it is. Work goes on where nobody can read that."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # its terminal is gone, the disk is full, or it was closed
        with contextlib.suppress(OSError, ValueError):
            _leave_unread(sys.stderr)


def _leave_unread(stream: Any) -> None:
    """What is left to write goes nowhere: at its end Python would try again, and fail."""
    unread = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(unread, stream.fileno())
    finally:
        os.close(unread)
