"""Where the `jaxlowprec` command begins: a package of its own, since importing jaxlowprec takes seconds.

Until the command itself can answer, this does: to Ctrl-C, to what cannot be imported, and to streams that are closed.
"""

from __future__ import annotations

import os
import signal
from typing import Any

_ERROR, _INTERRUPTED = 2, 130


def main() -> int:
    """The entry point of the command; returns the exit status."""
    occupy_standard_descriptors()
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        # KeyboardInterrupt would come up in the middle of compiled modules, which some do not survive.
        signal.signal(signal.SIGINT, _leave)
    try:
        from jaxlowprec.cli.main import main as run
    except (ImportError, OSError) as error:
        _say(f"cannot be started: {error}")
        return _ERROR
    signal.signal(signal.SIGINT, interrupted)
    status = run()
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own end would show where it was interrupted
    return status


def occupy_standard_descriptors() -> None:
    """Opens nothing in the place of closed standard streams: else a file that is opened takes one's number.

    What libraries write to standard error would then be written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the least number that is free: this one


def _leave(*_: Any) -> None:
    """Ends the process at once: nothing has been begun."""
    _say("interrupted")
    os._exit(_INTERRUPTED)


def _say(reason: str) -> None:
    text = " ".join(reason.split()).encode("ascii", "backslashreplace")
    os.write(2, b"jaxlowprec: " + text + b"\n")
