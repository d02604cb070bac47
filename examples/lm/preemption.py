"""Preemption: SIGTERM to any process ends all of them at the same step, with a checkpoint.

The processes agree by combining their flags before each step. JAX has a service for that, which agrees on a later step
in the background: `multihost_utils.reached_preemption_sync_point`. It needs one caller whose step numbers only grow;
but orbax calls it too, from its own thread and with the number of an older step, so that processes may end at different
steps. It also needs `jax.distributed`, which a single process does not use.
"""

from __future__ import annotations

import math
import signal
import time
from typing import Any

from lm.mesh import Layout


class Preempted(Exception):
    """A run has ended because its processes are to end; says where."""


class Notice:
    """Whether this process has received SIGTERM, or has run for so many seconds."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.received = False
        self._end = time.monotonic() + seconds

    def listen(self) -> None:
        """From now on SIGTERM does not end this process. Call it after `jax.distributed.initialize`, which installs a
        handler of its own."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: Any) -> None:
        self.received = True

    def reached(self, layout: Layout) -> bool:
        """Whether any process has received notice: the same answer in all processes, which all have to ask.

        Once it is yes, SIGTERM is ignored until the process ends: there is nothing more to say.
        """
        reached = layout.in_any_process(self.received or time.monotonic() >= self._end)
        if reached:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return reached
