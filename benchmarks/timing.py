"""Alternating measurement: machines are shared and drift, so both sides run in turn and ratios are taken of one run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import sources

from jaxlowprec.wiring import native

RESULTS = pathlib.Path(__file__).parent / "results"


def alternate(
    sides: dict[str, Callable[[], Any]],
    rounds: int = 25,
    least_seconds: float | None = None,
    pause: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Median and minimum seconds of each side, measured in turn. Short calls are repeated within a measurement.

    Arguments:
        least_seconds: of a measurement. Default: 0.002; on a GPU, for which waiting at the end takes 0.0005, 0.1.
        pause: seconds of rest, and then one call that is not measured, before each measurement: for sides with thread
            pools of their own, whose threads wait busily for a while after a call.
        clock: `time.process_time` counts what the processor works for this process, where others share it.
    """
    if least_seconds is None:
        least_seconds = 0.1 if jax.default_backend() == "gpu" else 0.002
    repeats = {}
    for name, call in sides.items():
        jax.block_until_ready(call())
        started = clock()
        jax.block_until_ready(call())
        repeats[name] = max(1, round(least_seconds / max(clock() - started, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            if pause:
                time.sleep(pause)
                jax.block_until_ready(call())
            started = clock()
            for _ in range(repeats[name]):
                out = call()
            jax.block_until_ready(out)
            seconds[name].append((clock() - started) / repeats[name])
    return {name: {"median": statistics.median(s), "min": min(s)} for name, s in seconds.items()}


class Cases:
    """Collects and prints."""

    def __init__(self):
        self.found: list[dict] = []

    def add(self, name, against, target, ours, theirs, rounds):
        """Measures both sides in turn. `target`: the least ratio of speeds, ours to theirs."""
        seconds = alternate({"ours": ours, "theirs": theirs}, rounds)
        ratio = {k: seconds["theirs"][k] / seconds["ours"][k] for k in ("median", "min")}
        self.found.append({"case": name, "against": against, "target": target, "ratio": ratio, **seconds})
        mine, other = (1e3 * seconds[side]["median"] for side in ("ours", "theirs"))
        target = target or "none"
        print(
            f"{name:66} {against:46} {ratio['median']:6.2f}x (target {target})  {mine:8.3f} ms, {other:8.3f} ms",
            flush=True,
        )


def keep_memory() -> None:
    """Starts the program again with an allocator that keeps freed memory, for both sides alike.

    Otherwise every result of a few MiB is fresh memory, and most of what is measured is the kernel handing out pages.
    """
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}
    if platform.system() == "Linux" and any(os.environ.get(k) != v for k, v in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})


def cpu_name() -> str:
    """The processor as the operating system names it."""
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """What a figure has to be read with."""
    return {
        "device": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": list(native.available_isas()),
        "versions": {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "commit": sources.commit(),
    }


def save(name: str, content: dict[str, Any], folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes results/<name>.json."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **content}, indent=1) + "\n")
    return path
