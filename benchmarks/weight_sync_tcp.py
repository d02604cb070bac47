"""Weights over TCP against a plain copy over a socket, both on loopback between two processes.

    python benchmarks/weight_sync_tcp.py [--mebibytes 512] [--bucket-mebibytes 64] [--streams 4] [--rounds 9] [--save]

The plain copy is `sendall` of one buffer at one end and `recv_into` of one buffer, the same every time, at the other.
The first case sends buckets that were made beforehand: a connection, handshake, pause, begin, frames through TLS,
checksums verified, commit, resume. `push` packs and checksums the next bucket while one travels. The last case has
several receivers, each in its own process, and a thread for each in the trainer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
from timing import save

from jaxlowprec.weight_sync.bucket import Bucket, pack
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.sending.session import push
from jaxlowprec.weight_sync.sending.source import WeightSource
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport

TARGET = 0.5
SECRET = b"a secret for one machine, of a benchmark"


def receive_plainly(connection, nbytes: int) -> None:
    """Takes copies, one a connection, until one is empty."""
    buffer = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection.send(server.getsockname()[1])
        while True:
            peer = server.accept()[0]
            with peer:
                got = 0
                while got < nbytes and (count := peer.recv_into(buffer[got:])):
                    got += count
                if not got:
                    return
                peer.sendall(b"1")


def receive_weights(connection) -> None:
    """Takes syncs until told to stop."""
    with TcpReceiver(Receiver(), SECRET) as listening:
        connection.send(listening.address[1])
        connection.recv()


def buckets_of(version: int, arrays: dict[str, np.ndarray], per_bucket: int) -> list[Bucket]:
    """Of a version, made beforehand."""
    names = list(arrays)
    groups = [names[i : i + per_bucket] for i in range(0, len(names), per_bucket)]
    return [
        pack(version, i, group is groups[-1], {name: arrays[name] for name in group}) for i, group in enumerate(groups)
    ]


def sync(transport: TcpTransport, buckets: list[Bucket], version: int) -> None:
    """One version."""
    manifest = Manifest(tuple(placed.entry for bucket in buckets for placed in bucket.entries))
    transport.pause(timeout=60)
    transport.begin(version, manifest, timeout=60)
    for bucket in buckets:
        transport.send(bucket, timeout=60)
    transport.commit(version, manifest.hash, timeout=60)
    transport.resume(timeout=60)


def copy(port: int, whole: memoryview) -> None:
    """Plainly."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(whole)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)


def seconds_of(actions: list[Callable[[], object]], threads: concurrent.futures.Executor) -> float:
    """Of actions that run at the same time."""
    started = time.perf_counter()
    for running in [threads.submit(action) for action in actions]:
        running.result()
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="of all streams together")
    parser.add_argument("--bucket-mebibytes", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4, help="how many there are where there are several")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    nbytes, most = options.mebibytes << 20, options.streams
    each = nbytes // most
    fork = multiprocessing.get_context("fork")  # no JAX backend is initialised here
    ports, ends = [], []
    for target, arguments in [(receive_plainly, (nbytes,))] * most + [(receive_weights, ())] * (1 + most):
        ours, theirs = fork.Pipe()
        fork.Process(target=target, args=(theirs, *arguments), daemon=True).start()
        ports.append(ours.recv())
        ends.append(ours)
    random = np.random.default_rng(0)
    arrays = {f"layer.{i}": random.integers(0, 256, 16 << 20, np.uint8) for i in range(options.mebibytes // 16)}
    parts = dict(list(arrays.items())[: each >> 24])
    whole = memoryview(random.integers(0, 256, nbytes, np.uint8)).cast("B")
    transport, *transports = [TcpTransport("127.0.0.1", port, SECRET) for port in ports[most:]]
    source, versions = WeightSource(arrays), itertools.count(1)
    per_bucket = max(1, options.bucket_mebibytes // 16)
    seconds: dict[str, list[float]] = {side: [] for side in ("plain", "buckets", "push", "plain streams", "streams")}
    with concurrent.futures.ThreadPoolExecutor(most) as threads:
        for _ in range(options.rounds + 1):
            first, second, third = (next(versions) for _ in range(3))
            buckets, of_part = buckets_of(first, arrays, per_bucket), buckets_of(third, parts, per_bucket)
            for side, actions in (
                ("plain", [functools.partial(copy, ports[0], whole)]),
                ("buckets", [functools.partial(sync, transport, buckets, first)]),
                (
                    "push",
                    [
                        functools.partial(
                            push, source, transport, version=second, max_bytes=options.bucket_mebibytes << 20
                        )
                    ],
                ),
                ("plain streams", [functools.partial(copy, port, whole[:each]) for port in ports[:most]]),
                ("streams", [functools.partial(sync, one, of_part, third) for one in transports]),
            ):
                seconds[side].append(seconds_of(actions, threads))
    cases = []
    for side, against, what, target in (
        ("buckets", "plain", "buckets made beforehand", TARGET),
        ("push", "plain", "push, packed and checksummed", TARGET),
        ("streams", "plain streams", f"buckets made beforehand, {most} streams", TARGET),
    ):
        ours, plain = seconds[side][1:], seconds[against][1:]  # the first ones fault memory in
        case = {
            "case": f"TCP on loopback, {what}",
            "against": "a plain socket copy",
            "target": target,
            "bytes": nbytes,
            "ratio": {
                "median": statistics.median(p / o for p, o in zip(plain, ours, strict=True)),
                "min": min(plain) / min(ours),
            },
            "ours": {"median": statistics.median(ours), "min": min(ours)},
            "theirs": {"median": statistics.median(plain), "min": min(plain)},
        }
        cases.append(case)
        print(
            f"{case['case']:50} {options.mebibytes} MiB  {nbytes / 2**30 / case['ours']['median']:5.2f} GiB/s, plain "
            f"{nbytes / 2**30 / case['theirs']['median']:5.2f} GiB/s: {case['ratio']['median']:.2f}x"
        )
    for port in ports[:most]:
        socket.create_connection(("127.0.0.1", port)).close()
    for end in ends[most:]:
        end.send(None)
    if options.save:
        save("weight_sync_tcp", {"cases": cases})


if __name__ == "__main__":
    main()
