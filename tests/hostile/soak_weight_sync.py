"""Thousands of syncs with a random fault each: processes killed and stopped, connections cut, disks full, limits met.

    python -m tests.hostile.soak_weight_sync [--syncs 10000] [--seed 1] [--minutes 0]

An engine and a trainer live through all of it; processes that are killed are others, made for it. After each sync:

* the engine goes on and serves a version whole, the old one or the new one, and never an older one than before;
* a version that a trainer was told is served is served, or, of a folder, is pulled;
* after a sync that failed the next one gets through, and leaves nothing unfinished on the disk;
* the engine listens, and has logged no error.

At the end both have the descriptors and threads that they had at the start, and no more memory. What is violated is
printed with the seed and the number of the sync, and the exit status is 1. It needs /proc.
"""

import argparse
import json
import sys
import tempfile
import time

from tests.hostile.soak.checks import Soak
from tests.hostile.soak.workers import KINDS, Violation

SLACK = 24 << 20
"""Bytes by which memory may differ: the allocator's own, over any number of syncs."""

WARM = 200  # syncs before the start is measured, at most a quarter
PRINTED = 10.0  # seconds between two lines of progress


def run(soak, syncs, minutes):
    """So many syncs, or minutes of them: (how many, what the processes used at the start, and at the end)."""
    for kind in KINDS:
        soak.push_well(kind)
    started = printed = time.monotonic()
    first, done = None, 0
    while done < syncs and (not minutes or time.monotonic() < started + 60 * minutes):
        if done == min(WARM, syncs // 4):
            first = soak.used()
        try:
            soak.sync()
        except (Violation, AssertionError) as violated:
            raise Violation(f"sync {done}: {violated}") from violated
        done += 1
        if time.monotonic() > printed + PRINTED:
            printed = time.monotonic()
            print(f"{done} of {syncs} syncs, {done / (printed - started):.1f}/s; {shown(soak.used())}", flush=True)
    return done, first or soak.used(), settled(soak, first)


def settled(soak, first):
    """What the processes use once it is no more than at the start; memory aside, which is not given back in time."""
    until = time.monotonic() + 10
    while more(first, now := soak.used(), ("descriptors", "threads")) and time.monotonic() < until:
        time.sleep(0.1)
    return now


def more(first, now, what):
    """What there is more of than at the start, as text."""
    return [
        f"{who} has {now[who][name]} of {name}, {first[who][name]} at the start"
        for who in first or ()
        for name in what
        if now[who][name] > first[who][name] + (SLACK if name == "memory" else 0)
    ]


def shown(now):
    """What the processes use, in a line."""
    return "; ".join(
        f"{who} {u['memory'] / (1 << 20):.0f} MiB, {u['descriptors']} descriptors, {u['threads']} threads"
        for who, u in now.items()
    )


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--syncs", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--minutes", type=float, default=0, help="ends after so many; 0: when the syncs are done")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(folder, given.seed)
        try:
            done, first, last = run(soak, given.syncs, given.minutes)
            print(json.dumps({"syncs": done, "counts": soak.summary(), "start": first, "end": last}))
            if leaked := more(first, last, ("memory", "descriptors", "threads")):
                raise Violation("; ".join(leaked))
        except Violation as violated:
            print(f"VIOLATED, seed {given.seed}: {violated}; {soak.summary()}", file=sys.stderr)
            return 1
        finally:
            soak.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
