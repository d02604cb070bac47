"""Weights over TCP against a plain copy over a socket, both on loopback between two processes.

    python benchmarks/weight_sync_tcp.py [--mebibytes 1024] [--bucket-mebibytes 128]

The plain copy is `sendall` of one buffer at one end and `recv_into` of one buffer, the same every time, at the other. A
sync is a session: a new connection, handshake, pause, begin, buckets that are made beforehand, checksums verified,
commit, resume; the receiver takes it into fresh memory, as it keeps the old version until the commit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
from timing import save

from jaxlowprec.weight_sync.bucket import Bucket, pack
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiver import Receiver
from jaxlowprec.weight_sync.tcp import TcpReceiver, TcpTransport

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


def sync(transport: TcpTransport, manifest: Manifest, buckets: list[Bucket], version: int) -> None:
    """One version."""
    transport.pause(timeout=60)
    transport.begin(version, manifest, timeout=60)
    for bucket in buckets:
        transport.send(bucket, timeout=60)
    transport.commit(version, manifest.hash, timeout=60)
    transport.resume(timeout=60)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints; writes benchmarks/results with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--bucket-mebibytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    nbytes = options.mebibytes << 20
    fork = multiprocessing.get_context("fork")  # no JAX backend is initialised here
    ports, ends = [], []
    for target, arguments in ((receive_plainly, (nbytes,)), (receive_weights, ())):
        ours, theirs = fork.Pipe()
        fork.Process(target=target, args=(theirs, *arguments), daemon=True).start()
        ports.append(ours.recv())
        ends.append(ours)
    random = np.random.default_rng(0)
    arrays = {f"layer.{i}": random.integers(0, 256, 16 << 20, np.uint8) for i in range(options.mebibytes // 16)}
    whole = memoryview(random.integers(0, 256, nbytes, np.uint8)).cast("B")
    transport = TcpTransport("127.0.0.1", ports[1], SECRET)
    plain, ours = [], []
    for version in range(1, options.rounds + 2):
        buckets = buckets_of(version, arrays, options.bucket_mebibytes // 16)
        manifest = Manifest(tuple(placed.entry for bucket in buckets for placed in bucket.entries))

        def copy() -> None:
            with socket.create_connection(("127.0.0.1", ports[0])) as peer:
                peer.sendall(whole)
                peer.recv(1)

        plain.append(seconds(copy))
        ours.append(seconds(lambda v=version, m=manifest, b=buckets: sync(transport, m, b, v)))
    plain, ours = plain[1:], ours[1:]  # the first ones fault memory in
    ratio = statistics.median(p / o for p, o in zip(plain, ours, strict=True))
    case = {
        "case": f"sync of {options.mebibytes} MiB over TCP, loopback",
        "against": "a plain socket copy",
        "target": TARGET,
        "bytes": nbytes,
        "ours": statistics.median(ours),
        "theirs": statistics.median(plain),
        "ratio": ratio,
    }
    print(
        f"{case['case']}: {nbytes / case['ours'] / 1e9:.2f} GB/s, plain {nbytes / case['theirs'] / 1e9:.2f} GB/s, "
        f"{ratio:.2f}x (target {TARGET})"
    )
    socket.create_connection(("127.0.0.1", ports[0])).close()
    ends[1].send(None)
    if options.save:
        save("weight_sync_tcp", {"cases": [case]})


if __name__ == "__main__":
    main()
