"""Hostile cases by the thousand: `python -m tests.hostile --minutes 480 --seed 1`. See README.md."""

import argparse
import collections
import hashlib
import pathlib
import sys
import time

from tests.hostile.limits import Isolated
from tests.hostile.mutation import Mutator
from tests.hostile.targets import TARGETS

CORPUS = pathlib.Path(__file__).parent / "corpus"
MOST_FAILURES = 20  # of a target, until it is left


def kept(target):
    """Cases that broke a target once: (file, bytes)."""
    return [(path, path.read_bytes()) for path in sorted((CORPUS / target).glob("*.bin"))]


def attack(target, seed, cases=None, until=None):
    """Runs cases against a target until there were so many, or until a moment of `time.monotonic`.

    Returns:
        how many were accepted, refused and broke it; and of those that broke it the bytes by their outcome's detail.
    """
    with Isolated(target) as worker:
        return attack_through(worker, target, seed, cases, until)


def attack_through(worker, target, seed, cases=None, until=None):
    """`attack` in the target's process that is there."""
    mutator = Mutator(f"{target} {seed}", TARGETS[target].seeds())
    counts, failures = collections.Counter(), {}
    while len(failures) < MOST_FAILURES and (counts.total() < cases if cases is not None else time.monotonic() < until):
        data = mutator.case(TARGETS[target].changed)
        outcome = worker.run(data)
        counts[outcome.kind] += 1
        if outcome.kind == "broke":
            failures.setdefault(outcome.detail, data)
            failures[outcome.detail] = min(data, failures[outcome.detail], key=len)
    return counts, failures


def keep(target, data):
    """Puts a case into the corpus; returns its file."""
    path = CORPUS / target / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def main():
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description="Attacks everything that reads.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together (default 10)")
    parser.add_argument("--cases", type=int, help="of each target, instead of minutes")
    parser.add_argument("--seed", default="0", help="of the cases; printed with what broke")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="all, unless named")
    parser.add_argument("--keep", action="store_true", help="put what broke into the corpus")
    options = parser.parse_args()
    broken = 0
    for target in options.target:
        began = time.monotonic()
        until = began + 60 * options.minutes / len(options.target)
        counts, failures = attack(target, options.seed, options.cases, until)
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("accepted", "refused", "broke"))
        print(f"{target:12} {counts.total():8} cases in {time.monotonic() - began:6.1f} s: {kinds}", flush=True)
        for detail, data in failures.items():
            print(f"    {detail}\n    seed {options.seed}, {len(data)} bytes: {data[:120]!r}")
            if options.keep:
                print(f"    kept as {keep(target, data).relative_to(CORPUS.parent)}")
        broken += counts["broke"]
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
