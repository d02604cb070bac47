"""A line of text that shows the progress of a command."""

from __future__ import annotations

import sys
import time

from jaxlowprec.checkpoints.conversion.engine import Progress
from jaxlowprec.cli.streams import show

_WIDTH = 30
_LEAST_SECONDS = 0.1


class Bar:
    """Shows the bytes done on standard error, if that is a terminal."""

    def __init__(self):
        self._shown = -_LEAST_SECONDS

    def __call__(self, done: int, total: int, label: str) -> None:
        """See `engine.Progress`."""
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
