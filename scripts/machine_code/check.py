"""Whether the kernels' machine code keeps enough bytes in flight, and takes few enough instructions an element.

    check.py FILE...            objects, cubins, libraries or wheels: a kernel that has too little in flight is an error
    check.py --table FILE...    every kernel's numbers too
    check.py --count FILE...    instructions of the loops of the quantisation kernels, an element
    check.py --partial ...      some architectures may be missing

It needs cuobjdump and nvdisasm on the path: scripts/check_machine_code.sh installs them. Nothing here runs on a GPU.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import counts
import in_flight
import kernels
import sass

ARCHITECTURES = ("sm_90a", "sm_100")


def cubins_of(path: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """The cubins in a file, for the architectures that are checked."""
    if path.suffix == ".cubin":
        return [path]
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (module,) = (name for name in wheel.namelist() if name.startswith("jaxlowprec/_native"))
            path = pathlib.Path(wheel.extract(module, folder))
    listed = subprocess.run(["cuobjdump", "-lelf", path], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        if any(f".{architecture}." in line for architecture in ARCHITECTURES):
            name = line.rpartition(" ")[2]
            subprocess.run(["cuobjdump", "-xelf", name, path.resolve()], cwd=folder, capture_output=True, check=True)
    return sorted(folder.glob("*.cubin"))


def disassembled(cubin: pathlib.Path) -> list[sass.Kernel]:
    """The kernels of a cubin, with their short names."""
    text = subprocess.run(["nvdisasm", cubin], capture_output=True, text=True, check=True).stdout
    found = sass.parse(text)
    for kernel, name in zip(found, sass.demangled([kernel.name for kernel in found]), strict=True):
        kernel.name = name
    return found


@dataclasses.dataclass(order=True)
class Result:
    """What is known of one kernel: a line of the table, what is wrong with it or nothing, and its row of counts."""

    architecture: str
    name: str
    line: str = ""
    error: str = ""
    counts: str = ""


def check(kernel: sass.Kernel) -> Result:
    """Whether a kernel has enough in flight."""
    result = Result(kernel.architecture, kernel.name)
    need = kernels.need_of(kernel.name)
    if need is None:
        result.error = f"{kernel.name}: scripts/machine_code/kernels.py does not say what it needs in flight"
        return result
    thread = in_flight.bytes_of_thread(kernel, need.in_loop)
    blocks = in_flight.blocks_held(kernel, need.dynamic_shared)
    total = thread * kernel.threads * blocks
    result.line = (
        f"{kernel.architecture:8} {kernel.name:58} {thread:4} B a thread, {blocks} blocks of {kernel.threads}:"
        f" {total / 1024:5.0f} KiB; {need.exempt or f'needs {need.bytes / 1024:.1f}'}"
    )
    if total < need.bytes:
        result.error = (
            f"{kernel.architecture} {kernel.name}: {thread} bytes a thread are loaded before the first of them is used,"
            f" {total / 1024:.1f} KiB a multiprocessor; it needs {need.bytes / 1024:.1f} KiB. Is there a branch around"
            " each load, or a use between them?"
        )
    most = kernels.most_instructions(kernel)
    if not result.error and most < math.inf:
        found = sum(count for _, count in counts.counted(kernel))
        if not 0 < found <= most:
            result.error = (
                f"{kernel.architecture} {kernel.name}: {found:.1f} instructions an element; at most {most} are allowed"
                " (MOST_INSTRUCTIONS in scripts/machine_code/kernels.py). 0: its loop was not found"
            )
    return result


def results_of(cubin: pathlib.Path, count: bool, cache: pathlib.Path | None) -> list[Result]:
    """What is known of the kernels of a cubin; `cache` is a folder of what these scripts found before."""
    if cache:
        sources = [path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))]
        digest = hashlib.sha256(b"\0".join([*sources, str(count).encode(), cubin.read_bytes()])).hexdigest()
        remembered = cache / f"{digest}.json"
        if remembered.exists():
            return [Result(**fields) for fields in json.loads(remembered.read_text())]
    found = disassembled(cubin)
    if count:
        results = [Result(k.architecture, k.name, counts=row) for k in found if (row := counts.row(k))]
    else:
        results = [check(kernel) for kernel in found]
    if cache:
        cache.mkdir(parents=True, exist_ok=True)
        partial = remembered.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([dataclasses.asdict(result) for result in results]))
        partial.replace(remembered)
    return results


def main(arguments: list[str]) -> int:
    """The command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--table", action="store_true", help="print every kernel's bytes in flight")
    parser.add_argument("--count", action="store_true", help="print instructions an element")
    parser.add_argument("--cache", type=pathlib.Path, help="a folder to keep results in, by what the files hold")
    parser.add_argument("--partial", action="store_true", help="not all architectures need be there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ProcessPoolExecutor() as pool:
        cubins = []
        for number, path in enumerate(options.files):
            folder = pathlib.Path(name) / str(number)
            folder.mkdir()
            cubins += cubins_of(path, folder)
        each = pool.map(results_of, cubins, itertools.repeat(options.count), itertools.repeat(options.cache))
        results = sorted(result for several in each for result in several)
    if options.count:
        print(*counts.HEAD, *(result.counts for result in results), sep="\n")
        return 0
    if options.table:
        print(*(result.line for result in results), sep="\n")
    errors = [result.error for result in results if result.error]
    if not options.partial:
        there = {result.architecture for result in results}
        errors += [f"there is no kernel for {missing}" for missing in ARCHITECTURES if missing not in there]
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print(f"{len(results)} kernels have enough bytes in flight")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
