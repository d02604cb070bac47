"""Writes and applies the files of a delta, which hold what changed since a base version.

A delta's folder holds `delta-00000.safetensors` and so on, one for each bucket in which something changed. A tensor
that changed in few places is stored as `runs:NAME` and `bytes:NAME` (see `changes.py`), one that changed in many as
`whole:NAME`, its bytes; an unchanged one is not stored. manifest.json has every tensor's checksum before and after.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile, SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.weight_sync.bucket import checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.changes import apply_runs, changed_bytes, changed_runs
from jaxlowprec.weight_sync.folders.record import Record, refusing
from jaxlowprec.weight_sync.folders.written_version import as_bytes
from jaxlowprec.weight_sync.manifest import Manifest

_DENSE = 8  # from one changed byte in this many on, the whole tensor is shorter than runs, or not much longer


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
