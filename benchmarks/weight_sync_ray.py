"""Weights through Ray's object store against other transports, from one trainer to several receivers of one machine.

    PYTHONPATH=examples python benchmarks/weight_sync_ray.py [--mebibytes 256] [--rounds 9] [--save]

Each receiver is a process. One side puts a version into the object store once, and has a session with each receiver,
all at the same time; the other side is a `FanOut`. Everything from packing to `resume` is measured. Needs Ray:
`pip install 'jaxlowprec[ray]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from rl.on_ray import cluster
from timing import save

from jaxlowprec.weight_sync import (
    FanOut,
    Receiver,
    Session,
    SharedMemoryReceiver,
    SharedMemoryTransport,
    TcpReceiver,
    TcpTransport,
    WeightSource,
)

SECRET = secrets.token_bytes(32)
BUCKET_BYTES = 64 << 20
MOST = 2  # receivers


def receive(connection, kind: str, folder: str) -> None:
    """Receives over TCP or shared memory until the connection ends."""
    path = f"{folder}/{multiprocessing.current_process().name}"
    receiver = Receiver()
    over_tcp = kind == "TCP"
    with TcpReceiver(receiver, SECRET) if over_tcp else SharedMemoryReceiver(receiver, SECRET, path) as listening:
        connection.send(listening.address[1] if over_tcp else path)
        with contextlib.suppress(EOFError):
            connection.recv()


def started(kind: str, folder: str) -> Any:
    """A transport to a receiver in a new process."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()  # there are no threads yet
    multiprocessing.get_context("fork").Process(target=receive, args=(theirs, kind, folder), daemon=True).start()
    address = ours.recv()
    return TcpTransport("127.0.0.1", address, SECRET) if kind == "TCP" else SharedMemoryTransport(address, SECRET)


def through_ray(source: WeightSource, receivers: int) -> Callable[[int], object]:
    """Syncs a version with so many actors."""
    import ray
    from rl.on_ray.transport import Inbox, ObjectStoreTransport, publish

    class Actor:
        def __init__(self):
            self._inbox = Inbox()

        def sync(self, *arguments):
            self._inbox.carry_out(*arguments)

    actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(receivers)]
    transports = [ObjectStoreTransport(actor, "the benchmark") for actor in actors]
    pool = ThreadPoolExecutor(receivers)

    def send(transport, published):
        with Session(transport, version=published.version) as session:
            session.send_buckets(published.manifest, published.buckets)

    def sync(version):
        published = publish(source, version, BUCKET_BYTES)
        return list(pool.map(lambda transport: send(transport, published), transports))

    return sync


def fanned_out(source: WeightSource, transports: list[Any]) -> Callable[[int], object]:
    """Syncs a version over other transports."""
    fan_out = FanOut({str(i): transport for i, transport in enumerate(transports)}, max_bytes=BUCKET_BYTES)

    def sync(version):
        delivery = fan_out.push(source, version)
        assert not delivery.failed, delivery

    return sync


def seconds(sides: dict[str, Callable[[int], object]], rounds: int, first: int) -> dict[str, list[float]]:
    """Seconds of each side's syncs, measured in turn from version `first` on, without the one that gets the memory."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for version in range(first, first + rounds + 1):
        for name, sync in sides.items():
            begun = time.perf_counter()
            sync(version)
            found[name].append(time.perf_counter() - begun)
    return {name: values[1:] for name, values in found.items()}


def cases(mebibytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measures and prints."""
    random = np.random.default_rng(0)
    arrays = {f"layer.{i}": random.integers(0, 256, 16 << 20, np.uint8) for i in range(mebibytes // 16)}
    source, kinds = WeightSource(arrays), ("TCP", "shared memory")
    with tempfile.TemporaryDirectory() as folder:
        transports = {kind: [started(kind, folder) for _ in range(MOST)] for kind in kinds}
        with cluster.joined(None, 2 * MOST, 4 * (mebibytes << 20)):
            for count in range(1, MOST + 1):
                sides = {"ray": through_ray(source, count)}
                sides |= {kind: fanned_out(source, transports[kind][:count]) for kind in kinds}
                found = seconds(sides, rounds, first=1 + count * (rounds + 1))
                ours = found.pop("ray")
                for kind, theirs in found.items():
                    case = {
                        "case": f"Ray's object store, {count} receiver{'s' if count > 1 else ''}",
                        "against": kind,
                        "target": None,
                        "bytes": mebibytes << 20,
                        "ratio": {
                            "median": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
                            "min": min(theirs) / min(ours),
                        },
                        "ours": {"median": statistics.median(ours), "min": min(ours)},
                        "theirs": {"median": statistics.median(theirs), "min": min(theirs)},
                    }
                    print(case, flush=True)
                    yield case


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    found = list(cases(options.mebibytes, options.rounds))
    if options.save:
        print(save("weight_sync_ray", {"cases": found}))


if __name__ == "__main__":
    main()
