"""One sync after the other, and what has to hold after each."""

import collections
import pathlib
import random
import time

from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX
from jaxlowprec.weight_sync.folders import layout as folders
from tests.hostile.soak import faults
from tests.hostile.soak.workers import DISKS, KINDS, PATIENCE, EngineProcess, TrainerProcess, Violation, Worker

TRIES = 3


class Soak:
    """The two processes, and which versions there are.

    Attributes:
        dice: what decides.
        folder: of the socket and of the folders of versions.
        port: of the engine.
    """

    def __init__(self, folder, seed):
        self.dice, self.folder = random.Random(seed), pathlib.Path(folder)
        self.engine = Worker(EngineProcess, folder)
        self.port = self.engine.ask("port")
        self.trainer = Worker(TrainerProcess, folder, self.port)
        self._newest = dict.fromkeys(KINDS, 0)  # that was ever begun
        self._served = dict.fromkeys(KINDS, 0)
        self._seconds = dict.fromkeys(KINDS, 0.05)  # of a push, about
        self._counts = collections.Counter()

    def sync(self):
        """One sync with a fault, and another if that failed."""
        kind = self.dice.choice(KINDS)
        fault = self.dice.choice([name for name, (_, kinds) in faults.FAULTS.items() if kind in kinds])
        version = self._next(kind)
        error = faults.FAULTS[fault][0](self, kind, version)
        self._counts[f"{fault}: {'served' if error is None else 'failed'}"] += 1
        self._check(kind, version, error, f"{fault} in a sync over {kind} ({error})")
        if error is not None:
            self.push_well(kind)

    def push_well(self, kind):
        """A sync with nothing wrong. On a busy machine a trainer may be silent for too long: it may try again."""
        for _ in range(TRIES):
            version, started = self._next(kind), time.monotonic()
            error = self.trainer.ask("push", kind, version, PATIENCE)
            self._check(kind, version, error, f"a plain sync over {kind} ({error})")
            if error is None:
                self._seconds[kind] = 0.9 * self._seconds[kind] + 0.1 * (time.monotonic() - started)
                break
            self._counts["plain: tried again"] += 1
        else:
            raise Violation(f"plain syncs over {kind} do not get through: {error}")
        if kind in DISKS and (left := sorted(p.name for p in (self.folder / kind).glob(TEMPORARY_PREFIX + "*"))):
            raise Violation(f"after a plain sync over {kind} {left} are left")

    def moment(self, kind):
        """Sleeps to some moment of a push."""
        time.sleep(self.dice.uniform(0, self._seconds[kind]))

    def resumed(self, kind):
        """What the engine says of a kind once it goes on."""
        until = time.monotonic() + PATIENCE
        while True:
            said = self.engine.ask("report", kind)
            if not said["listening"] or said["errors"]:
                raise Violation(f"the engine does not listen any more, or has logged errors: {said}")
            if said["serving"]:
                return said
            if time.monotonic() > until:
                raise Violation(f"the engine was not resumed: {said}")
            time.sleep(0.002)

    def used(self):
        """Memory, descriptors and threads of both."""
        return {who: getattr(self, who).ask("used") for who in ("engine", "trainer")}

    def summary(self):
        """How often each fault was survived by the sync, and how often not."""
        return dict(sorted(self._counts.items()))

    def end(self):
        """Ends both."""
        for worker in (self.trainer, self.engine):
            worker.kill()

    def _next(self, kind):
        self._newest[kind] += 1
        return self._newest[kind]

    def _check(self, kind, version, error, what):
        self.resumed(kind)
        if kind in DISKS:
            pulled = self.engine.ask("pull", kind)
            newest = max(folders.versions(self.folder / kind), default=0)
            if pulled != newest:
                raise Violation(f"after {what} the newest version is {newest}, and pull says {pulled}")
        said = self.resumed(kind)
        served, before = said["version"], self._served[kind]
        if not said["whole"]:
            raise Violation(f"after {what} a half version {served} is served")
        if not before <= served <= self._newest[kind]:
            raise Violation(f"after {what} version {served} is served; it was {before}")
        if error is None and served < version:
            raise Violation(f"version {version} was lost: after {what} {served} is served")
        self._served[kind] = served
