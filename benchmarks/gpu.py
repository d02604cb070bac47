"""The GPU's kernels against its memory and XLA's own bf16: every row a ratio of one run, both sides in turn.

python benchmarks/gpu.py                              # prints
python benchmarks/gpu.py --save [FILE]                # also writes benchmarks/results/gpu.json, or FILE, row by row
python benchmarks/gpu.py --list                       # names of the groups and rows, in the order of measurement
python benchmarks/gpu.py --only training '*few rows*' # some of them
python benchmarks/gpu.py --row NAME                   # launches our side of one row a few times, for a profiler
python benchmarks/gpu.py --divide 32                  # tiny sizes, on any device: shows that the program works

A file that was begun on the same device with the same library is continued: rows that it has are not measured again,
rows that failed or ended their run come last. `--again` measures all. benchmarks/gpu_file.py prints a file's table.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import sources
from gpu_file import UNFINISHED, Results
from gpu_profile import cuda_profiler
from gpu_rows import GROUPS, Bench, Row, rows
from gpu_trace import Clocks, in_turn, kernel_times
from timing import RESULTS, Cases, environment


def gpu_environment(divide: int) -> dict[str, Any]:
    """What a figure has to be read with."""
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = None
    cuda = " ".join(getattr(device.client, "platform_version", "").split())
    found = {"device": device.device_kind, "driver": driver, "cuda": cuda, "sources": sources.digest()}
    return environment() | found | ({"divide": divide} if divide > 1 else {})


def measure(row: Row, bench: Bench, results: Results) -> None:
    """Measures a row and writes it; an error is a result too, and so is a run that ends meanwhile."""
    name = {"case": row.case, "against": row.against, "target": row.target}
    results.put(name | {"error": UNFINISHED})
    try:
        make_ours, make_theirs = row.sides(bench)
        measured = Cases()
        ours, theirs = make_ours(), make_theirs()
        with Clocks() as clocks:
            measured.add(row.case, row.against, row.target, ours, theirs, bench.rounds)
            case = measured.found[0] | of_kernels(row, ours, theirs)
        case |= {"clocks": clocks.found} if clocks.found else {}
    except Exception as error:  # the other rows are worth having
        case = name | {"error": f"{type(error).__name__}: {error}"[:500]}
        print(f"{row.case:66} FAILED: {case['error'][:200]}", flush=True)
    results.environment |= bench.notes
    results.put(case)


def of_kernels(row: Row, ours: Callable, theirs: Callable) -> dict[str, Any]:
    """Seconds of both sides on the device and their ratio: of kernels together, by which rows of single operations are
    judged, and from a call's first kernel to its last, which shows what several launches cost.

    A host may take longer to start a kernel of some microseconds than a GPU to run it, so the ratio of whole calls says
    little of kernels. A training step is judged as a whole.
    """
    found = {} if row.group == "training" else in_turn(ours, theirs)
    case: dict[str, Any] = {}
    for what, seconds in found.items():
        name = {"kernels": "kernel", "span": "span"}[what]
        ratio = seconds["theirs"] / seconds["ours"]
        case |= {f"{name}_seconds": seconds, f"{name}_ratio": ratio}
        print(f"{'':66} {what:46} {ratio:6.2f}x", flush=True)
    return case


def launch(row: Row, bench: Bench, trace: pathlib.Path | None) -> None:
    """Calls our side after a warm-up, where a profiler looks; `trace`: file for XLA's own kernel times."""
    call = row.sides(bench)[0]()
    jax.block_until_ready(call())
    with cuda_profiler():
        jax.block_until_ready(call())
    if trace:
        trace.write_text(json.dumps(kernel_times(call)))


def main() -> int:
    """Measures and writes; the exit status is 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--divide", type=int, default=1, help="sizes by this much smaller")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help=f"{', '.join(GROUPS)}, or patterns")
    parser.add_argument("--list", action="store_true", help="print the names, measure nothing")
    parser.add_argument("--save", nargs="?", type=pathlib.Path, const=RESULTS / "gpu.json")
    parser.add_argument("--again", action="store_true", help="measure the rows that FILE has, too")
    parser.add_argument("--row", metavar="NAME", help="launch our side of one row, measure nothing")
    parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="with --row: write XLA's kernel times")
    options = parser.parse_args()
    patterns = [options.row] if options.row else options.only
    every = rows(jax.devices()[0].device_kind)
    chosen = [row for row in every if any(row.matches(pattern) for pattern in patterns)]
    if unknown := [p for p in patterns if not any(row.matches(p) for row in every)]:
        parser.error(f"{unknown[0]!r} is no row's name: needs one of {', '.join(GROUPS)}, or a pattern; --list has all")
    if options.list:
        for row in chosen:
            print(f"{row.group:9} {row.case:66} {row.against:38} target {row.target}")
        return 0
    if options.divide == 1 and jax.devices()[0].platform != "gpu":
        raise SystemExit("no GPU here (--divide 32 runs small sizes on any device)")
    bench = Bench(options.rounds, options.divide)
    if options.row:
        launch(chosen[0], bench, options.trace)
        return 0
    results = Results(options.save, gpu_environment(options.divide) | {"rows": len(every)}, options.again)
    left = [row for row in chosen if not results.measured(row.name)]
    if len(left) < len(chosen):
        print(f"{len(chosen) - len(left)} of {len(chosen)} rows are in {options.save} already", flush=True)
    for row in sorted(left, key=lambda row: results.failed(row.name)):
        measure(row, bench, results)
    return 1 if any(results.failed(row.name) for row in chosen) else 0


if __name__ == "__main__":
    raise SystemExit(main())
