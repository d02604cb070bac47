"""Ray for a run: a cluster that exists, or one of this machine that nothing else can reach."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import socket
import tempfile
from collections.abc import Iterator

from rl.engine import ClusterMissing

STORE_BYTES = 100 << 20
"""Enough for the small policy of this example: the store holds the current version of the weights."""


@contextlib.contextmanager
def joined(address: str | None, actors: int, store_bytes: int = STORE_BYTES) -> Iterator[None]:
    """Connects this process to Ray for the time of a block.

    A cluster of this machine listens on loopback, and accepts only processes that hold a secret made for this run. Its
    processes end with this one. If this one is killed, the actors end within seconds and Ray's agents within a minute.

    Arguments:
        address: HOST:PORT of a cluster; None: one is started on this machine.
        actors: how many actors a cluster of this machine has room for.
        store_bytes: the size of its object store.

    Raises:
        ClusterMissing: nothing answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # each line about a lost process counts
    if address is not None:
        _join(address)
        import ray

        try:
            yield
        finally:
            ray.shutdown()
        return
    with tempfile.TemporaryDirectory(prefix="rl_", ignore_cleanup_errors=True) as private:
        token, folder = pathlib.Path(private, "token"), pathlib.Path(private, "ray")
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ |= private_variables(token)
        import ray  # which reads these variables when it is imported

        ray.init(
            address="local",
            num_cpus=actors,
            object_store_memory=store_bytes,
            include_dashboard=False,
            logging_level="ERROR",
            _temp_dir=str(folder),
        )
        try:
            yield
        finally:
            ray.shutdown()


def _join(address: str) -> None:
    """Connects to a cluster. Raises ClusterMissing."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()  # Ray would try for minutes
        import ray

        ray.init(address=address, logging_level="ERROR")
    except OSError as error:
        raise ClusterMissing(f"--ray-address {address}: no cluster answers: {error}") from error


def private_variables(token: pathlib.Path) -> dict[str, str]:
    """Environment variables for Ray on loopback, among processes that can read a file with a secret."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which is Ray's name for listening beyond loopback
    }
