"""The engine's side of a folder of versions: brings the newest version, complete or as changes, to a receiver."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.weight_sync.bucket import checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.delta import Changes, apply_delta
from jaxlowprec.weight_sync.folders.directory import as_bytes
from jaxlowprec.weight_sync.folders.layout import Record, read_record, refusing
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.sockets import check_timeout

_LOOK = 0.1  # seconds between two looks for a version


def pull(path: str | os.PathLike[str], receiver: Receiver, *, wait: float = 0.0, timeout: float = 60.0) -> int:
    """Brings a receiver to the newest version of a folder, if that is newer than its own.

    A delta, and all deltas before it in their order, are applied to a copy: of what the receiver serves if that is an
    older version of the chain, otherwise of the complete version that the chain begins with. The checksums of all
    tensors are compared before and after, and those of all buckets. A version that is being read is not pruned.

    Arguments:
        path: the folder of versions.
        receiver: for deltas it has to serve published bytes (form "published"); complete versions fit any form.
        wait: seconds to wait if there is no newer version; 0: look once.
        timeout: seconds that the engine may take to pause.

    Returns:
        The version that is served now.

    Raises:
        ValueError: `wait` or `timeout` never ends.
        Refused: the newest version is damaged or cannot be opened, or its chain of deltas is broken; the path is not a
            folder of versions; or its newest version is older than the one that is served. The receiver serves its old
            version.

    >>> pull("/nowhere", Receiver())
    0
    """
    if not isinstance(wait, int | float) or not 0 <= wait < math.inf:
        raise ValueError(f"pull: wait is {wait!r}; needs seconds, 0 or more and finite")
    check_timeout("pull", timeout)
    folder, until = pathlib.Path(path), time.monotonic() + wait
    vanished: dict[int, FileNotFoundError] = {}
    while True:
        listed = folders.versions(folder)
        newest = max((v for v in listed if v > receiver.version and v not in vanished), default=0)
        if newest:
            try:
                _feed(folder, newest, receiver, timeout)
                return receiver.version
            except FileNotFoundError as error:  # pruned, so there is a newer one; or it can never be opened
                vanished[newest] = error
        elif time.monotonic() >= until:
            _check_newest(folder, max(listed, default=0), receiver.version, vanished)
            return receiver.version
        else:
            time.sleep(max(0.001, min(_LOOK, until - time.monotonic())))


def _check_newest(path: pathlib.Path, newest: int, served: int, vanished: dict[int, FileNotFoundError]) -> None:
    """Raises Refused if a folder has versions, but none that could be taken."""
    if newest in vanished:
        raise Refused(
            f"{path}: version {newest} is listed but cannot be opened: {vanished[newest]}; publish a complete version"
        ) from vanished[newest]
    if 0 < newest < served:
        raise Refused(
            f"{path}: the newest version is {newest}, and {served} is served: the folder was emptied, or is another "
            f"trainer's; versions increase: publish version {served + 1}, or make a new Receiver"
        )


def _feed(path: pathlib.Path, newest: int, receiver: Receiver, timeout: float) -> None:
    """Brings a version to a receiver. Raises FileNotFoundError if it was pruned before it was opened."""
    with contextlib.ExitStack() as opened:
        record, read = _chain(path, newest, receiver, opened)
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


Read = Callable[[str, np.ndarray], None]
"""Writes a tensor's bytes to their destination, uint8 [nbytes]."""


def _chain(path: pathlib.Path, newest: int, receiver: Receiver, opened: contextlib.ExitStack) -> tuple[Record, Read]:
    """A version's record, and a function that reads its tensors; the files that it needs stay open."""
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
        try:
            opened.enter_context(folders.being_read(folder))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Refused(f"{folder}: cannot be opened: {error.strerror}") from error
        record = read_record(folder)
        last = last or record
        if record.manifest.hash != last.manifest.hash:
            raise Refused(f"{folder}: has other tensors than version {newest}, which is a change of it")
        if record.base_version is None:
            return last, _reading(_from_files(folder, record, opened), links)
        with refusing(folder):
            links.append((record, opened.enter_context(Changes(folder, record.files))))
        version = record.base_version
        if _is_base(receiver, record):
            return last, _reading(_from_receiver(receiver), links)


def _is_base(receiver: Receiver, record: Record) -> bool:
    """Whether a receiver serves, to the byte, the base of a delta."""
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
                raise ValueError(f"tensor {brief(entry.name)} is {spec}; its manifest says {entry.dtype} {entry.shape}")

    def read(name: str, destination: np.ndarray) -> None:
        with refusing(folder):
            checkpoint.file_of(name).read_into(name, destination)
            if checksum(destination) != record.after.get(name):
                raise ValueError(f"tensor {brief(name)} is damaged: its checksum is wrong")

    return read


def _reading(base: Read, links: list[tuple[Record, Changes]]) -> Read:
    """A function that reads from the base and applies the deltas, oldest first."""

    def read(name: str, destination: np.ndarray) -> None:
        base(name, destination)
        digest = checksum(destination) if links else ""
        for record, changes in reversed(links):
            digest = apply_delta(name, destination, digest, changes, record)

    return read
