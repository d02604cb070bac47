"""A version that is being written to a disk."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxlowprec.checkpoints.files.folder import SINGLE_FILE, write_index
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import copy_whole
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader, checksum, views
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders.layout import publish, unfinished
from jaxlowprec.weight_sync.folders.record import Record, write_record
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.staging import Staging


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
