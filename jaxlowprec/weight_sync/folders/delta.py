"""Versions as changes since the previous version: between two steps of training most bytes stay the same.

A delta's folder holds `delta-00000.safetensors` and so on, one for each bucket in which something changed. A tensor
that changed in few places is stored as `runs:NAME` and `bytes:NAME`, one that changed in many as `whole:NAME`, its
bytes; an unchanged one is not stored. manifest.json has every tensor's checksum before and after.

A run is (bytes to skip, bytes to write), of 16 bits each. Unchanged bytes between two changed ones are written, too, if
that is shorter than another run. A gap that is longer than 65535 becomes several runs with nothing to write. Applying
runs twice has the same result as applying them once.

Changes are never applied to weights that are served: `pull` makes the new version beside the old one.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.open_files import memory
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile, SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.weight_sync.bucket import checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.directory import DirectoryTransport, WrittenVersion, as_bytes
from jaxlowprec.weight_sync.folders.layout import Record, refusing
from jaxlowprec.weight_sync.manifest import Manifest

_MERGE = 4  # bytes of a run: it costs as much as writing this many unchanged bytes
_CHUNK = 1 << 24  # bytes compared at once, which bounds memory
_RUNS = 1 << 16  # runs written at once
_MOST = 65535

_DENSE = 8  # from one changed byte in this many on, the whole tensor is shorter than runs, or not much longer
_LOG = logging.getLogger(__name__)


def changed_runs(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The difference from one tensor's bytes to another's of the same length.

    Arguments:
        old, new: uint8 [n].

    Returns:
        Runs, uint16 [r, 2], and the bytes that they write, uint8 [m].

    >>> changed_runs(np.zeros(9, np.uint8), np.asarray([0, 0, 7, 0, 8, 0, 0, 0, 0], np.uint8))
    (array([[2, 3]], dtype=uint16), array([7, 0, 8], dtype=uint8))
    """
    runs, values = [np.zeros((0, 2), np.uint16)], [np.zeros(0, np.uint8)]
    done = 0  # where the last run ended
    for begin in range(0, old.size, _CHUNK):
        after = new[begin : begin + _CHUNK]
        changed = np.flatnonzero(old[begin : begin + _CHUNK] != after)
        if not changed.size:
            continue
        breaks = np.flatnonzero(np.diff(changed) > _MERGE + 1)
        starts, ends = changed[np.append(0, breaks + 1)], changed[np.append(breaks, changed.size - 1)] + 1
        steps = np.zeros(after.size + 1, np.int8)
        steps[starts] += 1
        steps[ends] -= 1
        values.append(after[np.cumsum(steps[:-1], dtype=np.int8).astype(bool)])
        runs.append(_encode(starts - np.append(done - begin, ends[:-1]), ends - starts))
        done = begin + int(ends[-1])
    return np.concatenate(runs), np.concatenate(values)


def changed_bytes(old: np.ndarray, new: np.ndarray) -> int:
    """How many bytes differ.

    >>> changed_bytes(np.zeros(9, np.uint8), np.arange(9, dtype=np.uint8))
    8
    """
    chunks = range(0, old.size, _CHUNK)
    return sum(int(np.count_nonzero(old[i : i + _CHUNK] != new[i : i + _CHUNK])) for i in chunks)


def _encode(gaps: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Runs of 16 bits: first those that only skip, then the gap's rest with the first bytes, then the other bytes."""
    skips = gaps // _MOST
    writes = np.maximum(-(-lengths // _MOST), 1)
    each = skips + writes
    place = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    skips, writes, gaps, lengths = (np.repeat(values, each) for values in (skips, writes, gaps, lengths))
    left = lengths - (place - skips) * _MOST
    runs = np.empty((place.size, 2), np.uint16)
    runs[:, 0] = np.where(place < skips, _MOST, np.where(place == skips, gaps % _MOST, 0))
    runs[:, 1] = np.where(place < skips, 0, np.minimum(left, _MOST))
    return runs


def apply_runs(tensor: np.ndarray, runs: np.ndarray, values: np.ndarray) -> None:
    """Applies changes to a tensor's bytes, uint8 [n].

    Raises:
        ValueError: the runs are longer than the tensor, or do not fit the bytes; nothing was written.

    >>> tensor = np.zeros(9, np.uint8)
    >>> apply_runs(tensor, np.asarray([[2, 3]], np.uint16), np.asarray([7, 0, 8], np.uint8))
    >>> tensor
    array([0, 0, 7, 0, 8, 0, 0, 0, 0], dtype=uint8)
    """
    gaps, written = (int(total) for total in runs.sum(0, dtype=np.int64))
    if gaps + written > tensor.size or written != values.size:
        raise ValueError(
            f"runs that end at {gaps + written} and write {written} bytes; the tensor has {tensor.size}, given are "
            f"{values.size}"
        )
    place = taken = 0
    for first in range(0, len(runs), _RUNS):
        some = runs[first : first + _RUNS].astype(np.int64)
        ends, count = place + np.cumsum(some.sum(1)), some[:, 1]
        if count.sum() > _CHUNK:  # the runs are few and long
            for end, length in zip(ends.tolist(), count.tolist(), strict=True):
                tensor[end - length : end] = values[taken : taken + length]
                taken += length
        else:
            before = np.cumsum(count) - count
            places = np.repeat(ends - count - before, count) + np.arange(count.sum())
            tensor[places] = values[taken : taken + places.size]
            taken += places.size
        place = int(ends[-1])


class Base:
    """The bytes of the previous version, which a trainer keeps to compare with.

    >>> base = Base(7, Manifest(()), {}, {})
    >>> base.version, base.deltas
    (7, 0)
    """

    def __init__(self, version: int, manifest: Manifest, tensors: dict[str, np.ndarray], checksums: dict[str, str]):
        self.version, self.manifest, self.tensors, self.checksums = version, manifest, tensors, checksums
        self.deltas = 0  # number of deltas since the last complete version


class ChangesWriter:
    """Writes what changed since a base version.

    Arguments:
        folder: an existing folder.
        base: the version to compare with; it is not changed.

    >>> import tempfile
    >>> old, new = np.zeros(99, np.uint8), np.eye(1, 99, 5, np.uint8)[0]
    >>> base = Base(7, Manifest(()), {"a": old}, {"a": checksum(old)})
    >>> with tempfile.TemporaryDirectory() as path:
    ...     writer = ChangesWriter(pathlib.Path(path), base)
    ...     writer.write({"a": new}, {"a": checksum(new)})
    ...     with Changes(pathlib.Path(path), writer.finish()[1]) as changes:
    ...         changes.apply("a", old)
    >>> bool((old == new).all())
    True
    """

    def __init__(self, folder: pathlib.Path, base: Base):
        self._folder, self._base, self._files = folder, base, 0

    def write(self, arrays: Mapping[str, np.ndarray], checksums: Mapping[str, str]) -> None:
        """Compares the tensors, and writes a file if anything changed."""
        changed: dict[str, np.ndarray] = {}
        for name, array in arrays.items():
            if checksums[name] == self._base.checksums[name]:
                continue
            old, new = self._base.tensors[name], as_bytes(array)
            if changed_bytes(old, new) > new.size // _DENSE:
                changed[f"whole:{name}"] = new
            else:
                changed[f"runs:{name}"], changed[f"bytes:{name}"] = changed_runs(old, new)
        if changed:
            specs = {
                name: TensorSpec("U16" if array.dtype == np.uint16 else "U8", array.shape)
                for name, array in changed.items()
            }
            with SafetensorsWriter(self._folder / _file(self._files), specs) as file:
                for name, array in changed.items():
                    file.write(name, array)
            self._files += 1

    def finish(self) -> tuple[int | None, int, dict[str, str]]:
        """Does nothing more: every file is on the disk already."""
        return self._base.version, self._files, dict(self._base.checksums)

    def abandon(self) -> None:
        """Does nothing: no file is open."""


class Changes:
    """The changes of a delta, open for reading. A context manager. See `ChangesWriter`.

    Arguments:
        folder: the delta's folder.
        files: the number of its files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: pathlib.Path, files: int):
        self._opened: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            for number in range(files):
                self._opened.append(SafetensorsFile(folder / _file(number)))
                self._file_of |= dict.fromkeys(self._opened[-1].specs, self._opened[-1])
        except BaseException:
            self.close()
            raise

    def apply(self, name: str, tensor: np.ndarray) -> None:
        """Changes a tensor's bytes, uint8 [nbytes], to this version's. Raises ValueError if the changes do not fit."""
        if whole := self._file_of.get(f"whole:{name}"):
            size = whole.header.tensors[f"whole:{name}"].spec.nbytes
            if size != tensor.size:
                raise ValueError(f"tensor {brief(name)}: {size} bytes; needs {tensor.size}")
            whole.read_into(f"whole:{name}", tensor)
        elif file := self._file_of.get(f"runs:{name}"):
            runs = file.read(f"runs:{name}")
            if runs.dtype != np.uint16 or runs.ndim != 2 or runs.shape[1] != 2:
                raise ValueError(f"tensor {brief(name)}: runs are {runs.dtype} {runs.shape}; needs uint16 [n, 2]")
            apply_runs(tensor, runs, file.raw(f"bytes:{name}"))

    def close(self) -> None:
        """Closes the files."""
        for file in self._opened:
            file.close()

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def apply_delta(name: str, tensor: np.ndarray, digest: str, changes: Changes, record: Record) -> str:
    """Changes a tensor's bytes to those of a delta's version. A tensor that already has them is left as it is.

    Arguments:
        name: the tensor's name.
        tensor: uint8 [nbytes]; a copy, never one that is served.
        digest: its checksum.
        changes, record: the delta's.

    Returns:
        The checksum afterwards.

    Raises:
        Refused: the tensor is neither the delta's base nor its result, or the delta is damaged.
    """
    before, after = record.before.get(name), record.after.get(name)
    if digest == after:
        return digest
    where = f"delta {record.version}: tensor {brief(name)}"
    if digest != before:
        raise Refused(
            f"{where} has checksum {digest}; it applies to version {record.base_version}'s, {brief(before)}; "
            "publish a complete version"
        )
    with refusing(pathlib.Path(folders.folder_name(record.version, delta=True))):
        changes.apply(name, tensor)
    found = checksum(tensor)
    if found != after:
        raise Refused(
            f"{where} is damaged: applied, it has checksum {found}, not {brief(after)}; publish a complete version"
        )
    return found


def count_files(folder: pathlib.Path) -> int:
    """The number of files with changes in a delta's folder.

    >>> count_files(pathlib.Path("/nowhere"))
    0
    """
    return len(list(folder.glob("delta-*.safetensors")))


def _file(number: int) -> str:
    return f"delta-{number:05}.safetensors"


class DeltaTransport(DirectoryTransport):
    """Publishes what changed since the previous version; at intervals, and after a restart, a complete version.

    The trainer's process keeps the bytes of the previous version in memory, as many as one version has. The names of
    versions show which are complete. Everything else is as in `DirectoryTransport`.

    Arguments:
        path, keep, files, shard_bytes: see `DirectoryTransport`. `keep` counts complete versions; their deltas stay.
        full_every: one version in this many is complete.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> with tempfile.TemporaryDirectory() as path:
    ...     transport = DeltaTransport(path, full_every=3)
    ...     for version in (1, 2, 3, 4):
    ...         bucket = pack(version, 0, True, {"a": np.arange(99) + version, "b": np.ones(99)})
    ...         manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    ...         transport.pause(timeout=5)
    ...         transport.begin(version, manifest, timeout=5)
    ...         transport.send(bucket, timeout=5)
    ...         transport.commit(version, manifest.hash, timeout=5)
    ...         transport.resume(timeout=5)
    ...     [folder.name for folder in folders.versions(transport.path).values()]
    ['v000001', 'v000002-delta', 'v000003-delta', 'v000004']
    """

    def __init__(self, path: Any, *, full_every: int = 8, **options: Any):
        super().__init__(path, **options)
        if type(full_every) is not int or full_every < 1:
            raise ValueError(f"DeltaTransport: full_every is {full_every!r}; needs at least 1")
        self._full_every = full_every
        self._base: Base | None = None

    def _next(self, version: int, manifest: Manifest) -> WrittenVersion:
        base = self._base
        fits = (
            base is not None
            and base.version == max(folders.versions(self.path), default=0)
            and base.manifest.hash == manifest.hash
        )
        if base is None or not fits or base.deltas + 1 >= self._full_every:
            return super()._next(version, manifest)
        folder = self.path / folders.folder_name(version, delta=True)
        return WrittenVersion(folder, version, manifest, lambda to: ChangesWriter(to, base))

    def _published(self, written: WrittenVersion) -> None:
        base, self._base = self._base, None
        try:
            self._base = _advanced(base, written)
        except (OSError, ValueError) as error:  # the version is published; only the base for the next one is lost
            _LOG.warning("weight sync: the next version will be complete, not a delta: %s", error)


def _advanced(base: Base | None, written: WrittenVersion) -> Base:
    """Brings a base to the version that was published, from its files."""
    staging = written.staging
    if base is not None and folders.is_delta(written.folder):
        with Changes(written.folder, count_files(written.folder)) as changes:
            for name, tensor in base.tensors.items():
                if written.checksums[name] != base.checksums[name]:
                    changes.apply(name, tensor)
        base.deltas += 1
    else:
        with CheckpointFolder(written.folder) as opened:
            if base is None or base.manifest.hash != staging.manifest.hash:
                base = Base(0, staging.manifest, {n: memory(e.nbytes) for n, e in staging.manifest.by_name.items()}, {})
            for name, tensor in base.tensors.items():
                opened.file_of(name).read_into(name, tensor)
        base.deltas = 0
    base.version, base.checksums = staging.version, written.checksums
    return base
