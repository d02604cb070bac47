"""A version that is being written to a disk."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxlowprec.checkpoints.files.folder import INDEX_FILE, SINGLE_FILE, write_index
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.strict_json import repeated
from jaxlowprec.checkpoints.files.written_whole import copy_whole
from jaxlowprec.locks import locked
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader, checksum, views
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.layout import RECORD_FILE, Record, publish, unfinished, write_record
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.staging import Staging
from jaxlowprec.weight_sync.transports.sockets import check_timeout
from jaxlowprec.weight_sync.transports.transport import Closing
from jaxlowprec.weight_sync.versions import newer

SHARD_BYTES = 5 << 30
"""The most bytes of a safetensors file, unless a single tensor has more."""


class Writer(Protocol):
    """Writes the tensors of one version into its folder."""

    def write(self, arrays: Mapping[str, np.ndarray], checksums: Mapping[str, str]) -> None:
        """Writes the tensors of the next bucket, whose bytes have these checksums."""

    def finish(self) -> tuple[int | None, int, dict[str, str]]:
        """Flushes everything to the disk; returns (base version, files of changes, checksums of the base's tensors)."""

    def abandon(self) -> None:
        """Closes open files."""


class CompleteWriter:
    """Writes a complete version: shards and their index, as Hugging Face has them.

    Arguments:
        folder: an existing folder.
        manifest: the version's manifest.
        shard_bytes: the size of a file, unless a single tensor has more.

    >>> import tempfile
    >>> from jaxlowprec.weight_sync.manifest import Entry
    >>> with tempfile.TemporaryDirectory() as path:
    ...     writer = CompleteWriter(pathlib.Path(path), Manifest((Entry("a", "U8", (2,)), Entry("b", "U8", (2,)))), 2)
    ...     writer.write({"a": np.zeros(2, np.uint8), "b": np.ones(2, np.uint8)}, {})
    ...     writer.finish()
    ...     sorted(file.name for file in pathlib.Path(path).iterdir())[:2]
    (None, 0, {})
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, shard_bytes: int):
        self._folder, self._manifest = folder, manifest
        shards: list[dict[str, TensorSpec]] = [{}]
        filled = 0
        for entry in manifest.entries:
            if filled and filled + entry.nbytes > shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][entry.name] = TensorSpec(entry.dtype, entry.shape)
            filled += entry.nbytes
        self._sharded = len(shards) > 1
        self._open: list[SafetensorsWriter] = []
        self._writer_of: dict[str, SafetensorsWriter] = {}
        try:
            for number, specs in enumerate(shards, 1):
                name = f"model-{number:05}-of-{len(shards):05}.safetensors" if self._sharded else SINGLE_FILE
                self._open.append(SafetensorsWriter(folder / name, specs))
                self._writer_of |= dict.fromkeys(specs, self._open[-1])
        except BaseException:
            self.abandon()
            raise

    def write(self, arrays: Mapping[str, np.ndarray], checksums: Mapping[str, str]) -> None:
        """Writes each tensor to its shard."""
        for name, array in arrays.items():
            self._writer_of[name].write(name, array)

    def finish(self) -> tuple[int | None, int, dict[str, str]]:
        """Flushes the shards to the disk, and writes the index if there are several."""
        while self._open:
            self._open.pop().commit()
        if self._sharded:
            shard_of = {name: writer.path.name for name, writer in self._writer_of.items()}
            write_index(self._folder, shard_of, self._manifest.nbytes)
        return None, 0, {}

    def abandon(self) -> None:
        """Closes the shards."""
        while self._open:
            self._open.pop().abandon()


class WrittenVersion:
    """A version that is being written, in a folder that gets its final name at the end.

    Arguments:
        folder: the final path; until the end, a folder beside it with a temporary name is used.
        version, manifest: as announced.
        writer: makes the writer of the tensors, given the temporary folder.

    Attributes:
        folder: as given.
        checksums: of the tensors that were written.

    Raises:
        Refused: a bucket is out of order, damaged, or does not fit the manifest.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     folder = pathlib.Path(path, "v000001")
    ...     version = WrittenVersion(folder, 1, Manifest(()), lambda to: CompleteWriter(to, Manifest(()), 1))
    ...     version.finish([])
    ...     sorted(file.name for file in folder.iterdir())
    ['manifest.json', 'model.safetensors']
    """

    def __init__(
        self, folder: pathlib.Path, version: int, manifest: Manifest, writer: Callable[[pathlib.Path], Writer]
    ):
        self.folder = folder
        self.checksums: dict[str, str] = {}
        self.staging = Staging(version, manifest)
        self._headers: list[BucketHeader] = []
        self._temporary = unfinished(folder)
        try:
            self._writer = writer(self._temporary)
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def take(self, bucket: Bucket) -> None:
        """Writes the next bucket."""
        self.staging.check(bucket.header)
        if checksum(bucket.payload) != bucket.checksum:
            raise Refused(f"bucket {bucket.index} of version {bucket.version} is corrupt: its checksum is wrong")
        arrays = views(bucket.header, np.frombuffer(bucket.payload, np.uint8))
        checksums = {name: checksum(as_bytes(array)) for name, array in arrays.items()}
        self._writer.write(arrays, checksums)
        self.checksums |= checksums
        self._headers.append(bucket.header)
        # The arrays are in the file; `staging` only has to count that they came.
        self.staging.take_arrays(Bucket(bucket.header, tuple(arrays.values())), lambda name, array: None)

    def finish(self, files: Sequence[pathlib.Path]) -> None:
        """Flushes the version to the disk, with copies of `files`, and gives it its name."""
        self.staging.complete()
        base_version, count, before = self._writer.finish()
        for file in files:
            copy_whole(file, self._temporary / file.name)
        version, manifest = self.staging.version, self.staging.manifest
        record = Record(version, base_version, count, manifest, tuple(self._headers), before, self.checksums)
        write_record(self._temporary, record)
        publish(self._temporary, self.folder)

    def abandon(self) -> None:
        """Removes what was written."""
        self._writer.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """An array's bytes, uint8 [nbytes]; a view if the array is contiguous.

    >>> as_bytes(np.ones(2, np.int16))
    array([1, 0, 1, 0], dtype=uint8)
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class DirectoryTransport(Closing):
    """Publishes each version as a folder `v000007` with everything that an engine loads. See `Transport`.

    The folder is written under a temporary name and gets its final name at `commit`, when all of it is on the disk.
    Engines are not paused: they take a version when they want, by `pull` or on their own. One trainer writes at a time.
    `timeout` limits waiting for another trainer; it does not limit writing and waiting for the disk.

    Arguments:
        path: the folder of versions; it is made if it is missing.
        keep: how many complete versions stay; versions that somebody reads stay, too.
        files: files that are copied into every version, such as config.json and the tokenizer's files.
        shard_bytes: the size of a safetensors file.

    Raises:
        Refused: another trainer is writing; the version is not newer than those in the folder; or buckets are out of
            order or damaged.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> from jaxlowprec.weight_sync.folders.pulling import pull
    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> bucket = pack(1, 0, True, {"a": np.ones(2, np.float32)})
    >>> manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    >>> with tempfile.TemporaryDirectory() as path:
    ...     transport = DirectoryTransport(path)
    ...     transport.pause(timeout=5)
    ...     transport.begin(1, manifest, timeout=5)
    ...     transport.send(bucket, timeout=5)
    ...     transport.commit(1, manifest.hash, timeout=5)
    ...     transport.resume(timeout=5)
    ...     receiver = Receiver()
    ...     pull(path, receiver)
    1
    >>> receiver.weights["a"]
    array([1., 1.], dtype=float32)
    """

    takes_arrays = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        files: Sequence[str | os.PathLike[str]] = (),
        shard_bytes: int = SHARD_BYTES,
    ):
        if type(keep) is not int or keep < 1:
            raise ValueError(f"{type(self).__name__}: keep is {keep!r}; needs at least 1")
        self.path = pathlib.Path(path)
        self._keep, self._files, self._shard_bytes = keep, [pathlib.Path(file) for file in files], shard_bytes
        for file in self._files:
            if not file.is_file() or file.name == RECORD_FILE or file.name.endswith((".safetensors", INDEX_FILE)):
                raise ValueError(
                    f"{type(self).__name__}: files has {file}; needs files beside the weights, as config.json"
                )
        if name := repeated(file.name for file in self._files):
            twice = " and ".join(str(file) for file in self._files if file.name == name)
            raise ValueError(f"{type(self).__name__}: files has {twice}; needs files with names of their own")
        self._lock: int | None = None
        self._open: WrittenVersion | None = None
        self._newest = 0  # the newest version that this transport published

    def version(self, timeout: float) -> int:
        """The newest published version; 0: none yet. It keeps counting even if somebody empties the folder."""
        return max((self._newest, *folders.versions(self.path)))

    def pause(self, timeout: float) -> None:
        """Takes the folder for this trainer, and removes what a killed trainer left."""
        if self._lock is not None:
            raise Refused(f"pause: {self.path}: a session is open already; resume it first")
        check_timeout("pause", timeout)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise Refused(f"pause: {self.path}: Not a directory; needs the folder of versions") from error
        self._lock = _lock(self.path / folders.LOCK, timeout)
        folders.remove_unfinished(self.path)

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version."""
        if self._lock is None:
            raise Refused("begin: no session is open; pause first")
        if self._open is not None:
            raise Refused(f"begin: version {self._open.staging.version} is being written; abort it first")
        self._open = self._next(newer(version, self.version(timeout), "published"), manifest)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Writes the next bucket's tensors."""
        self._opened("send").take(bucket)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """Flushes the version to the disk, gives it its name, and removes old versions."""
        opened = self._opened("commit")
        staging = opened.staging
        if (version, manifest_hash) != (staging.version, staging.manifest.hash):
            raise Refused(
                f"commit: version {version!r}, manifest {manifest_hash!r}; {staging.version}, "
                f"{staging.manifest.hash!r} is being written"
            )
        opened.finish([] if folders.is_delta(opened.folder) else self._files)
        self._open, self._newest = None, staging.version
        self._published(opened)
        folders.prune(self.path, self._keep)

    def abort(self, reason: str, timeout: float) -> None:
        """Removes what was written since `begin`."""
        self._forget()

    def resume(self, timeout: float) -> None:
        """Releases the folder to other trainers."""
        self._forget()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def close(self) -> None:
        """Ends an open session."""
        self.resume(timeout=0)

    def _opened(self, verb: str) -> WrittenVersion:
        if self._open is None:
            raise Refused(f"{verb}: no version is being written; begin one first")
        return self._open

    def _forget(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.abandon()

    def _next(self, version: int, manifest: Manifest) -> WrittenVersion:
        """The writer of the next version."""
        folder = self.path / folders.folder_name(version)
        return WrittenVersion(folder, version, manifest, lambda to: CompleteWriter(to, manifest, self._shard_bytes))

    def _published(self, written: WrittenVersion) -> None:
        """Called after a version got its name."""


def _lock(path: pathlib.Path, timeout: float) -> int:
    """An open descriptor that holds the trainers' lock. Raises Refused if another trainer has it, or locking fails."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise Refused(f"pause: {path}: {error.strerror}; needs a file that trainers can lock, and no link") from error
    try:
        if not locked(descriptor, timeout):
            raise Refused(
                f"pause: {path.parent}: another trainer has been writing for {timeout:g} s; let it end, or stop it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
