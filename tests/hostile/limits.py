"""Runs one hostile case after the other in a process of its own, which a signal, the clock or its memory may end.

The worker answers each case with one line of JSON. Time is the worker's own processor time, which a loaded machine does
not change; a case that answers nothing at all is ended by the clock.
"""

import dataclasses
import json
import pathlib
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time

from tests.helpers import python_environment

ROOT = pathlib.Path(__file__).parents[2]
LEAST_SECONDS, SECONDS_PER_MEGABYTE = 5.0, 5.0  # of processor time: fifty times what most cases take
MEMORY = 512 << 20  # bytes of address space beyond what the worker has after its first cases
SILENCE = 60.0  # seconds until a worker that says nothing is ended
STARTING = 300.0  # seconds for its imports and first cases

LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "accepted", "refused" or "broke".
        detail: of a refusal its sentence, of what broke how.
        seconds: of processor time.
    """

    kind: str
    detail: str = ""
    seconds: float = 0.0


def allowed_seconds(data):
    """Processor time that a case may take."""
    return LEAST_SECONDS + SECONDS_PER_MEGABYTE * len(data) / 1e6


class Isolated:
    """A target in a process of its own; a context manager. After a case that ended it there is a new one.

    Arguments:
        target: its name in `tests.hostile.targets.TARGETS`.
        memory: bytes that the cases may take.
    """

    def __init__(self, target, memory=MEMORY):
        self._target, self._memory, self._process = target, memory, None

    def run(self, data):
        """What becomes of a case."""
        if self._process is None:
            self._start()
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
            answer = self._line(SILENCE)
        except BrokenPipeError:
            answer = b""
        if not answer:
            return Outcome("broke", self._stop(), 0.0)
        outcome = Outcome(**json.loads(answer))
        if outcome.kind != "broke" and outcome.seconds > allowed_seconds(data):
            limit = allowed_seconds(data)
            return Outcome("broke", f"took {outcome.seconds:.1f} s for {len(data)} bytes; allowed {limit:.1f} s")
        return outcome

    def _start(self):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _stop)
        command = [sys.executable, "-m", "tests.hostile.worker", self._target, str(self._memory)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        if self._line(STARTING) != b'"ready"\n':
            raise AssertionError(f"{self._target}: its worker did not start: {self._stop()}")

    def _line(self, seconds):
        """What the worker says, up to the end of a line; b"" if it has ended or says nothing for so long."""
        found, until = b"", time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        while not found.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                return b""
            piece = self._process.stdout.read1()
            if not piece:
                return b""
            found += piece
        return found

    def _stop(self):
        """Ends the worker, and says how it was found."""
        process, self._process = self._process, None
        try:
            code = process.wait(5)  # if it has ended, the system may still be at work on that
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            how = f"said nothing for {SILENCE:g} s"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        process.stdin.close()
        process.stdout.close()
        self._errors.seek(0)
        said = self._errors.read()[-1000:].decode(errors="replace")
        self._errors.close()
        return f"{how}: {said}" if said else how

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(600)
            self._process.stdout.close()
            self._errors.close()
            self._process = None
