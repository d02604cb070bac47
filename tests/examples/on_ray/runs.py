"""Runs of rl_loop.py --engine ray, whose processes can be found and killed."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from tests.helpers import python_environment

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
SCRIPT = str(EXAMPLES / "rl_loop.py")
PROGRAM = str(pathlib.Path(__file__).parent / "program.py")  # which is SCRIPT, and can be held
SMALL = ("--layers", "1", "--width", "32", "--digits", "2", "--prompts", "4", "--answers", "4", "--updates", "1")
LONGEST = 600.0  # seconds; a machine that is slow or busy takes a part of them
VARYING = ("sync_ms", "generate_ms", "learn_ms", "answered_by")  # times, and who answered


def numbers(records):
    """Records without what differs from run to run."""
    return [{name: value for name, value in record.items() if name not in VARYING} for record in records]


def records_of(out):
    return json.loads((out / "report.json").read_text())["iterations"]


def answering(records):
    """The processes that wrote answers, in the order of their first ones."""
    return list(dict.fromkeys(part["process"] for record in records for part in record["answered_by"]))


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a run.

    Attributes:
        started: in ticks since the machine's start; a later process with the same id has another one.
        title: its command line; an actor's title has the method that it runs.
    """

    pid: int
    started: int
    title: str = dataclasses.field(compare=False)

    @property
    def role(self):
        """ "worker", "trainer", "raylet" or "driver"; None for any other."""
        if actor := re.match(r"ray::(Worker|Trainer)\b", self.title):
            return actor[1].lower()
        return "raylet" if "/raylet --" in self.title else "driver" if PROGRAM in self.title else None

    @property
    def does(self):
        """The method that an actor runs; "waits": none."""
        method = re.match(r"ray::\w+\.(\w+)", self.title)
        return method[1] if method else "waits"

    @property
    def lives(self):
        now = _processes().get(self.pid)
        return now is not None and now[1].started == self.started

    def kill(self):
        """Kills it, and says whether it lived until now."""
        lived = self.lives
        if lived:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return lived


class Run:
    """The program in a process of its own. A context manager: at the end of its block all its processes are dead.

    Arguments:
        hold_after: iterations after which the driver waits until `proceed`.

    Attributes:
        said: the lines that it has printed.
    """

    def __init__(self, out, *options, hold_after=()):
        self._folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True)
        self.said = []
        self._seen = set()
        path = os.pathsep.join([str(EXAMPLES), python_environment()["PYTHONPATH"]])
        for iteration in hold_after:
            (self.folder / f"after-{iteration}").touch()
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, "--engine", "ray", "--out", str(out), *SMALL, *options],
            env=python_environment(
                PYTHONPATH=path,
                HOLD=self._folder.name,
                TMPDIR=self._folder.name,  # Ray's sockets need a short path
                RAY_worker_register_timeout_seconds=str(int(LONGEST)),  # until a worker that is slow to start is killed
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.processes()
        self._process.kill()
        for process in self._seen:
            process.kill()
        self._process.wait(30)
        self._reader.join(30)
        self._folder.cleanup()

    def _read(self):
        for line in self._process.stdout:
            self.said.append(line)

    @property
    def text(self):
        return "".join(self.said)

    @property
    def folder(self):
        """The run's folder for temporary files, in which Ray has its own."""
        return pathlib.Path(self._folder.name)

    @property
    def iterations(self):
        """How many lines of iterations it has printed, repeated ones too."""
        return sum(line.startswith("iteration ") for line in list(self.said))

    @property
    def code(self):
        """Its exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout=LONGEST):
        code = self._process.wait(timeout)
        self._reader.join(30)
        return code

    def wait_for(self, condition, timeout=LONGEST):
        """Waits until a condition holds. Fails if the run ends before."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.code is None and time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def wait_until_held(self, iteration):
        self.wait_for((self.folder / f"held-{iteration}").exists)

    def proceed(self, iteration):
        """Lets the driver go on that is held after an iteration."""
        (self.folder / f"after-{iteration}").unlink()

    def processes(self):
        """All processes of the run that descend from the program's."""
        there, found = _processes(), set()
        new = {self._process.pid} & there.keys()
        while new:
            found |= new
            new = {pid for pid, (parent, _) in there.items() if parent in found} - found
        processes = [there[pid][1] for pid in found]
        self._seen |= set(processes)
        return processes

    def of(self, *roles):
        return [process for process in self.processes() if process.role in roles]

    def survivors(self, agents=True, patience=120.0):
        """The processes that were seen and have not ended after some seconds, Ray's agents among them or not."""

        def alive():
            return [process for process in self._seen if (agents or process.role) and process.lives]

        deadline = time.monotonic() + patience
        while alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive()


def _processes():
    """Maps the ids of all processes that have not ended to the parent's id and the process."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid, fields = int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if fields[0] != "Z":
                found[pid] = int(fields[1]), Process(pid, int(fields[19]), title)
    return found
