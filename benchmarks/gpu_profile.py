"""Profiles the rows of a benchmark file that are the furthest below their targets: bandwidth, occupancy, stall reasons.

python benchmarks/gpu_profile.py FILE --save PROFILES.json    # the worst three rows, by Nsight Compute (ncu)

Without ncu, or where it may not read the counters, the table has XLA's own kernel times only. Rows that PROFILES.json
has for the same device and library are not profiled again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import ctypes
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from gpu_file import identity, load, reached, worst

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy", "WarpStateStats")
METRICS = {  # column of the table: ncu's name
    "seconds": "gpu__time_duration.sum",
    "bytes_per_second": "dram__bytes.sum.per_second",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "possible_occupancy_percent": "sm__maximum_warps_per_active_cycle_pct",
    "registers": "launch__registers_per_thread",
}
STALLED = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
LAUNCHES = 32  # kernels of a row that ncu looks at; each is run many times over


# --- in the process that is profiled


@contextlib.contextmanager
def cuda_profiler() -> Iterator[None]:
    """Lets ncu see only the launches within; does nothing where there is no CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield
        return
    context = ctypes.c_void_p()
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)  # the one that XLA uses
    driver.cuCtxSetCurrent(context)
    started = driver.cuProfilerStart()
    print(f"cuProfilerStart: {started}", flush=True)
    try:
        yield
    finally:
        driver.cuProfilerStop()


# --- in the process that profiles


def number(text: str) -> float | None:
    """A cell of ncu's."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def parse(text: str) -> list[dict[str, Any]]:
    """The kernels of ncu's raw page in CSV: a line of names, one of units, one for each launch.

    Launches of one kernel are averaged. Stall reasons are warps that wait for each instruction issued, the most
    frequent first.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return []
    names, units, *launches = list(csv.reader(lines))
    unit = dict(zip(names, units, strict=True))
    of_kernel = collections.defaultdict(list)
    for launch in launches:
        row = dict(zip(names, launch, strict=True))
        of_kernel[row["Kernel Name"]].append(row)

    def mean(rows: list[dict], name: str) -> float | None:
        values = [v for row in rows if (v := number(row.get(name, ""))) is not None]
        return sum(values) / len(values) if values else None

    found = []
    for kernel, rows in of_kernel.items():
        record: dict[str, Any] = {"kernel": kernel, "launches": len(rows)}
        record |= {column: mean(rows, name) for column, name in METRICS.items()}
        if record["seconds"] is not None:
            record["seconds"] *= NANOSECONDS.get(unit[METRICS["seconds"]], 1) * 1e-9
        stalls = {m[1]: mean(rows, name) for name in names if (m := STALLED.fullmatch(name))}
        known = {reason: value for reason, value in stalls.items() if value and reason != "selected"}
        record["stalls"] = dict(sorted(known.items(), key=lambda pair: -pair[1])[:4])
        found.append(record)
    return sorted(found, key=lambda k: -(k["seconds"] or 0) * k["launches"])


def run_row(name: str, divide: int, *prefix: str, arguments: tuple = (), **variables: str) -> str:
    """Runs benchmarks/gpu.py for one row under a profiler; its output, with an exception where it fails."""
    program = [sys.executable, str(pathlib.Path(__file__).with_name("gpu.py"))]
    command = [*prefix, *program, "--row", name, "--divide", str(divide), *arguments]
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{prefix[0] if prefix else 'gpu.py'} ended with {done.returncode}: {done.stdout[-600:]}")
    return done.stdout


def by_ncu(name: str, divide: int) -> list[dict[str, Any]]:
    """A row's kernels with the hardware's counters."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        options = ["--clock-control", "none", "--launch-count", str(LAUNCHES), "--csv", "--page", "raw"]
        options += ["--print-units", "base", "--log-file", str(log)]
        for section in SECTIONS:
            options += ["--section", section]
        options += ["--metrics", ",".join(METRICS.values())]
        # ncu saves the memory that a kernel writes before it runs the kernel again: not all of a pool of many GB.
        flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="}
        flags["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        # Where the driver does not pass the profiler's start on, the library's kernels are told by their namespace.
        for which in (
            ["--profile-from-start", "off"],
            ["--kernel-name-base", "demangled", "--kernel-name", "regex:jaxlowprec|nvjet|xmma|cutlass"],
        ):
            said = run_row(name, divide, "ncu", *options, *which, **(flags if divide == 1 else {}))
            text = log.read_text() if log.exists() else ""
            if kernels := parse(text):
                return kernels
    raise RuntimeError(f"ncu saw no kernel: {text[-400:]} {said[-400:]}")


def by_xla(name: str, divide: int) -> list[dict[str, Any]]:
    """A row's kernels with XLA's times only."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "kernels.json"
        run_row(name, divide, arguments=("--trace", str(file)))
        return json.loads(file.read_text())


def profile(case: dict, divide: int) -> dict[str, Any]:
    """One row: its kernels, how they were observed, and why not by ncu."""
    found = {k: case[k] for k in ("case", "against", "target", "ratio", "kernel_ratio") if k in case}
    why = "ncu is not on the PATH: it comes with the CUDA toolkit, as Nsight Compute"
    if shutil.which("ncu"):
        try:
            return found | {"by": "ncu", "kernels": by_ncu(case["case"], divide)}
        except RuntimeError as error:
            why = f"ncu failed: {error}"
    print(f"{why}; XLA's kernel times instead, without bandwidth, occupancy and stall reasons", flush=True)
    return found | {"by": "XLA's profiler", "why": why, "kernels": by_xla(case["case"], divide)}


def table(found: dict[str, Any]) -> str:
    """A row's kernels, the longest first."""

    def shown(value, scale, form):
        return "-" if value is None else format(value * scale, form)

    ratio, target = reached(found), found["target"]
    lines = [f"{found['case']}: {ratio:.2f}x, target {target}, by {found['by']}"]
    lines.append(f"  {'kernel':58} {'n':>3} {'us':>8} {'GB/s':>6} {'dram%':>6} {'occ%':>11} {'reg':>4}  stalls")
    for k in found["kernels"][:8]:
        stalls = ", ".join(f"{reason} {value:.1f}" for reason, value in k.get("stalls", {}).items())
        of, possible = (shown(k.get(f"{p}occupancy_percent"), 1, ".0f") for p in ("", "possible_"))
        memory = f"{shown(k.get('bytes_per_second'), 1e-9, ',.0f'):>6} {shown(k.get('memory_percent'), 1, '.0f'):>6}"
        registers = shown(k.get("registers"), 1, ".0f")
        times = f"{k['launches']:3} {shown(k['seconds'], 1e6, ',.1f'):>8}"
        lines.append(f"  {k['kernel'][:58]:58} {times} {memory} {of + ' of ' + possible:>11} {registers:>4}  {stalls}")
    if not found["kernels"]:
        lines.append("  no kernel of a GPU was seen")
    return "\n".join(lines)


def main() -> int:
    """Profiles and writes row by row; the exit status is 1 if a row could not be profiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, help="what benchmarks/gpu.py --save has written")
    parser.add_argument("--worst", type=int, default=3, help="how many rows")
    parser.add_argument("--save", type=pathlib.Path)
    options = parser.parse_args()
    if not options.file.exists():
        print(f"gpu_profile.py: {options.file} does not exist: needs the rows that benchmarks/gpu.py --save writes")
        return 1
    result = load(options.file)
    environment = result["environment"]
    found: dict[str, Any] = {"environment": environment, "rows": []}
    if options.save and options.save.exists():
        before = load(options.save)
        if identity(before["environment"]) == identity(environment):
            found["rows"] = before["rows"]
    cases, failed = worst(result["cases"], options.worst), 0
    if not cases:
        print(f"gpu_profile.py: {options.file} has no measured row with a target")
        return 1
    for case in cases:
        row = next((r for r in found["rows"] if r["case"] == case["case"]), None)
        if row is None:
            try:
                row = profile(case, environment.get("divide", 1))
            except Exception as error:  # the other rows are worth having
                failed += 1
                print(f"{case['case']}: FAILED: {error}", flush=True)
                continue
            found["rows"].append(row)
        print(table(row), flush=True)
        if options.save:
            options.save.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
