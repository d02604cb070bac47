"""`jaxlowprec convert` of a checkpoint of Llama 2 7B's shapes against `cp -r` of it: the whole command, and its memory.

    python benchmarks/convert_7b.py [--folder DIR] [--rounds 3] [--scheme w4a16 nvfp4] [--save]

The weights are random, 12.6 GiB in bfloat16, written in files of 2 GiB. Both sides begin with the source as far as
the page cache holds it, and write into a new folder, which is removed afterwards. The command's time has the start of
Python and JAX and the compilation in it, and it ends when its files are on the disk, which `cp` does not wait for;
memory is the largest resident set of its process. All schemes are measured that quantise plain matrices: gpt_oss_mxfp4
takes arrays of experts alone.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from convert import Shape, make_checkpoint
from timing import save

from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes import NAMES

LLAMA_2_7B = Shape(hidden=4096, inner=11008, vocabulary=32000, key_heads=1.0, head=True)
LAYERS, SHARD_BYTES = 32, 2 << 30
TARGET, MOST_MEMORY = 0.5, 2 << 30
SCHEMES = [name for name in NAMES if name != "gpt_oss_mxfp4"]


def ran(command: list[str], made: pathlib.Path) -> tuple[float, int]:
    """The seconds and the largest resident set, in bytes, of a command that makes a folder, which is removed again."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - started
    shutil.rmtree(made)
    if status:
        raise SystemExit(f"{' '.join(command)}: exit status {os.waitstatus_to_exitcode(status)}")
    return taken, usage.ru_maxrss * 1024


def measure(source: pathlib.Path, work: pathlib.Path, scheme: str, rounds: int) -> dict[str, float]:
    """Medians of both sides, in turn, and of the ratios of each turn; the largest memory."""
    program = pathlib.Path(sys.executable).parent / "jaxlowprec"
    convert = [str(program), "convert", str(source), str(work / "ours"), "--scheme", scheme, "--json"]
    copies, conversions, memory = [], [], []
    for _ in range(rounds):
        copies.append(ran(["cp", "-r", str(source), str(work / "copy")], work / "copy")[0])
        seconds, resident = ran(convert, work / "ours")
        conversions.append(seconds)
        memory.append(resident)
    ratio = statistics.median(copy / ours for copy, ours in zip(copies, conversions, strict=True))
    sides = {"copy": statistics.median(copies), "ours": statistics.median(conversions)}
    return sides | {"ratio": ratio, "memory_bytes": max(memory)}


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="where to work, with 30 GB free (default: the folder for temporary files)"
    )
    parser.add_argument("--scheme", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = pathlib.Path(folder)
        source = work / "source"
        make_checkpoint(source, LLAMA_2_7B, options.layers, SHARD_BYTES)
        with CheckpointFolder(source) as opened:
            nbytes = opened.nbytes
        cases = []
        for scheme in options.scheme:
            found = measure(source, work, scheme, options.rounds)
            cases.append({"scheme": scheme, **found})
            print(
                f"{scheme:14} {nbytes / 2**30:.1f} GiB  ours {found['ours']:.1f} s, cp {found['copy']:.1f} s "
                f"({found['ratio']:.2f}x, target {TARGET}), {found['memory_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
        if options.save:
            what = {"source_bytes": nbytes, "target": TARGET, "most_memory_bytes": MOST_MEMORY}
            save("convert_7b", what | {"rounds": options.rounds, "cases": cases})


if __name__ == "__main__":
    main()
