"""Weights over TCP against a plain copy over a socket, both on loopback between two processes.

    python benchmarks/weight_sync_tcp.py [--mebibytes 512] [--bucket-mebibytes 64] [--rounds 9] [--save]

The plain copy is `sendall` of one buffer at one end and `recv_into` of one buffer, the same every time, at the other.
The first case sends buckets that were made beforehand: a connection, handshake, pause, begin, signed frames,
checksums verified, commit, resume; once plainly and once through TLS. The last one is `push`, which packs and
checksums the next bucket while one travels.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import socket
import statistics
import time

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


def receive_weights(connection, encrypt: bool) -> None:
    """Takes syncs until told to stop."""
    with TcpReceiver(Receiver(), SECRET, encrypt=encrypt) as listening:
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
        peer.recv(1)


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--bucket-mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    nbytes = options.mebibytes << 20
    fork = multiprocessing.get_context("fork")  # no JAX backend is initialised here
    ports, ends = [], []
    for target, arguments in ((receive_plainly, (nbytes,)), (receive_weights, (False,)), (receive_weights, (True,))):
        ours, theirs = fork.Pipe()
        fork.Process(target=target, args=(theirs, *arguments), daemon=True).start()
        ports.append(ours.recv())
        ends.append(ours)
    random = np.random.default_rng(0)
    arrays = {f"layer.{i}": random.integers(0, 256, 16 << 20, np.uint8) for i in range(options.mebibytes // 16)}
    whole = memoryview(random.integers(0, 256, nbytes, np.uint8)).cast("B")
    transport = TcpTransport("127.0.0.1", ports[1], SECRET)
    through_tls = TcpTransport("127.0.0.1", ports[2], SECRET, encrypt=True)
    source, versions = WeightSource(arrays), itertools.count(1)
    seconds: dict[str, list[float]] = {"plain": [], "buckets": [], "tls": [], "push": []}
    for _ in range(options.rounds + 1):
        version = next(versions)
        buckets = buckets_of(version, arrays, max(1, options.bucket_mebibytes // 16))
        for side, action in (
            ("plain", functools.partial(copy, ports[0], whole)),
            ("buckets", functools.partial(sync, transport, buckets, version)),
            ("tls", functools.partial(sync, through_tls, buckets, version)),
            (
                "push",
                functools.partial(
                    push, source, transport, version=next(versions), max_bytes=options.bucket_mebibytes << 20
                ),
            ),
        ):
            started = time.perf_counter()
            action()
            seconds[side].append(time.perf_counter() - started)
    plain = seconds["plain"][1:]  # the first ones fault memory in
    cases = []
    for side, what, target in (
        ("buckets", "buckets made beforehand", TARGET),
        ("tls", "buckets made beforehand, encrypted", None),
        ("push", "push, packed and checksummed", TARGET),
    ):
        ours = seconds[side][1:]
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
            f"{case['case']:46} {options.mebibytes} MiB  {nbytes / 2**30 / case['ours']['median']:5.2f} GiB/s, plain "
            f"{nbytes / 2**30 / case['theirs']['median']:5.2f} GiB/s: {case['ratio']['median']:.2f}x"
        )
    socket.create_connection(("127.0.0.1", ports[0])).close()
    for end in ends[1:]:
        end.send(None)
    if options.save:
        save("weight_sync_tcp", {"cases": cases})


if __name__ == "__main__":
    main()
