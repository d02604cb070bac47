"""The engine's side of a folder of versions: the newest one, from complete files or from changes, into a receiver."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np

from jaxlowprec.checkpoints.folder import CheckpointFolder
from jaxlowprec.weight_sync import folders
from jaxlowprec.weight_sync.bucket import checksum
from jaxlowprec.weight_sync.delta_files import Changes, apply_delta
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.receiver import Receiver
from jaxlowprec.weight_sync.record import Record, read_record, refusing
from jaxlowprec.weight_sync.written_version import as_bytes

_LOOK = 0.1  # seconds between two looks for a version


def pull(path: str | os.PathLike[str], receiver: Receiver, *, wait: float = 0.0, timeout: float = 60.0) -> int:
    """Brings a receiver to the newest version of a folder, if that is newer than its own.

    A delta is applied to a copy of what it changes, with all deltas in between in their order: of what the receiver
    serves if it has an older version of the chain, else of the complete version that the chain begins with. Every
    tensor's checksum is compared before and after, and every bucket's. While it reads, the version is not pruned.

    Arguments:
        path: of the folder.
        receiver: that serves published bytes (form "published") or whatever it makes of complete versions.
        wait: seconds to wait for a newer version, if there is none.
        timeout: seconds that the engine may take to pause.

    Returns:
        the version that is served now.

    Raises:
        Refused: the newest version is damaged, or its chain of deltas is broken. The receiver serves its old version.

    >>> pull("/nowhere", Receiver())
    0
    """
    folder, until = pathlib.Path(path), time.monotonic() + wait
    while True:
        newest = max(folders.versions(folder), default=0)
        if newest > receiver.version and _feed(folder, newest, receiver, timeout):
            return receiver.version
        if newest <= receiver.version and time.monotonic() >= until:
            return receiver.version
        time.sleep(max(0.001, min(_LOOK, until - time.monotonic())))


def _feed(path: pathlib.Path, newest: int, receiver: Receiver, timeout: float) -> bool:
    """Whether it could; not if the version was pruned before it was open, since then there is a newer one."""
    with contextlib.ExitStack() as opened:
        try:
            record, read = _chain(path, newest, receiver, opened)
        except FileNotFoundError:
            return False
        receiver.pause(timeout)
        try:
            receiver.begin(record.version, record.manifest)
            for header in record.buckets:
                destination = np.frombuffer(receiver.destination(header), np.uint8)
                end = 0
                for placed in header.entries:
                    destination[end : placed.offset] = 0
                    end = placed.end
                    read(placed.entry.name, destination[placed.offset : placed.end])
                receiver.received(header)
            receiver.commit(record.version, record.manifest.hash)
        except BaseException as error:
            receiver.abort(str(error))
            raise
        finally:
            receiver.resume()
    return True


Read = Callable[[str, np.ndarray], None]
"""Puts a tensor's bytes to their destination, uint8 [nbytes]."""


def _chain(path: pathlib.Path, newest: int, receiver: Receiver, opened: contextlib.ExitStack) -> tuple[Record, Read]:
    """A version's record, and what reads its tensors; all that it needs stays open."""
    found = folders.versions(path)
    links: list[tuple[Record, Changes]] = []  # newest first
    version = newest
    last: Record | None = None
    while True:
        folder = found.get(version)
        if folder is None:
            raise Refused(
                f"{path}: version {newest} is a change of {version}, which is not there; publish a complete version"
            )
        opened.enter_context(folders.being_read(folder))
        record = read_record(folder)
        last = last or record
        if record.base_version is None:
            return last, _reading(_from_files(folder, record, opened), links)
        if record.base_version >= version:
            raise Refused(f"{folder}: is a change of version {record.base_version}, which is newer")
        with refusing(folder):
            links.append((record, opened.enter_context(Changes(folder, record.files))))
        version = record.base_version
        if _is_base(receiver, record):
            return last, _reading(_from_receiver(receiver), links)


def _is_base(receiver: Receiver, record: Record) -> bool:
    """Whether what a receiver serves is, to the byte, what a delta is a change of."""
    weights = receiver.weights
    if (
        weights.version != record.base_version
        or weights.form != "published"
        or weights.manifest.hash != record.manifest.hash
    ):
        return False
    return all(checksum(as_bytes(np.asarray(weights[name]))) == digest for name, digest in record.before.items())


def _from_receiver(receiver: Receiver) -> Read:
    weights = receiver.weights

    def read(name: str, destination: np.ndarray) -> None:
        np.copyto(destination, as_bytes(np.asarray(weights[name])))

    return read


def _from_files(folder: pathlib.Path, record: Record, opened: contextlib.ExitStack) -> Read:
    with refusing(folder):
        checkpoint = opened.enter_context(CheckpointFolder(folder))
        for entry in record.manifest.entries:
            spec = checkpoint.spec(entry.name)
            if (spec.dtype, spec.shape) != (entry.dtype, entry.shape):
                raise ValueError(f"tensor {entry.name!r} is {spec}; its manifest says {entry}")

    def read(name: str, destination: np.ndarray) -> None:
        with refusing(folder):
            checkpoint.file_of(name).read_into(name, destination)
            if checksum(destination) != record.after.get(name):
                raise ValueError(f"tensor {name!r} is damaged: its checksum is wrong")

    return read


def _reading(base: Read, links: list[tuple[Record, Changes]]) -> Read:
    """Reads from the base, and applies deltas, the oldest first."""

    def read(name: str, destination: np.ndarray) -> None:
        base(name, destination)
        digest = checksum(destination) if links else ""
        for record, changes in reversed(links):
            digest = apply_delta(name, destination, digest, changes, record)

    return read
