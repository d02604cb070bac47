"""What kernels take on a GPU, by JAX's profiler: those of single calls, and of two sides in turn in one trace."""

from __future__ import annotations

import collections
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

REPEATS = 10  # of the order ours, theirs, theirs, ours
SETTLING = 0.2  # of a trace's calls, which are not measured: the clock still rises
WARM_SECONDS = 0.05  # of calls before a trace


class Event(NamedTuple):
    """A kernel or a copy of memory; start and duration in seconds."""

    start: float
    duration: float
    name: str


def events(run: Callable[[], Any]) -> list[Event]:
    """What a GPU does while a function runs, in the order of its start; nothing where there is no GPU."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(file))
        found = [
            Event(event.start_ns * 1e-9, event.duration_ns * 1e-9, event.name)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    return sorted(found)


def kernel_times(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Launches and mean seconds of each kernel of a call, the longest first."""
    found = collections.defaultdict(list)
    for event in events(call):
        found[event.name].append(event.duration)
    kernels = [{"kernel": k, "launches": len(s), "seconds": sum(s) / len(s)} for k, s in found.items()]
    return sorted(kernels, key=lambda k: -k["seconds"] * k["launches"])


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Of both sides, median seconds of a call's kernels together, and from its first one's start to its last one's end.

    Both run in one trace in the order ours, theirs, theirs, ours, after a warm-up: clocks and caches favour neither.
    Nothing where there is no GPU, or where the calls of a side launch different numbers of kernels.
    """
    import jax

    calls = {"ours": ours, "theirs": theirs}
    launches = {name: len(events(call)) for name, call in calls.items()}
    if not all(launches.values()):
        return {}
    order = ["ours", "theirs", "theirs", "ours"] * REPEATS
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        jax.block_until_ready([call() for call in calls.values()])

    def run() -> Any:
        result = None
        for name in order:
            result = calls[name]()  # the one before it is freed when its kernels have ended
        return result

    found = events(run)
    expected = sum(launches[name] for name in order)
    if len(found) != expected:
        print(f"a trace of {len(order)} calls has {len(found)} kernels, not {expected}: not measured", flush=True)
        return {}
    sums, spans = collections.defaultdict(list), collections.defaultdict(list)
    for place, name in enumerate(order):
        own, found = found[: launches[name]], found[launches[name] :]
        if place >= SETTLING * len(order):
            sums[name].append(sum(event.duration for event in own))
            spans[name].append(max(event.start + event.duration for event in own) - own[0].start)
    medians = {"kernels": sums, "span": spans}
    return {what: {name: statistics.median(of[name]) for name in calls} for what, of in medians.items()}


class Clocks:
    """Samples the device's clock and power while its block runs.

    `found` has the medians; nothing without nvidia-smi.
    """

    QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=100")

    def __enter__(self) -> Clocks:
        self.found: dict[str, float] = {}
        try:
            self._process = subprocess.Popen(self.QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self._process = None
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is None:
            return
        self._process.terminate()
        samples = [line.split(",") for line in self._process.communicate()[0].splitlines() if line.count(",") == 1]
        for name, values in zip(("sm_megahertz", "watts"), zip(*samples, strict=True), strict=False):
            self.found[name] = statistics.median(float(value) for value in values)
