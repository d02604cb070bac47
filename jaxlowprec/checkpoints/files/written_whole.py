"""Files that appear complete or not at all: written under a temporary name in their folder, then renamed."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any, Self

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.open_files import OpenFile, about, copy_range
from jaxlowprec.checkpoints.files.safetensors_header import MAX_HEADER_BYTES
from jaxlowprec.checkpoints.files.strict_json import load_json

TEMPORARY_PREFIX = ".jaxlowprec-writing-"
_MAX_JSON_BYTES = MAX_HEADER_BYTES  # an index names the same tensors as the headers
_LONGEST_NAME = 255  # bytes: the limit of file systems


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """The temporary name of a file until it is published: in the same folder, so that renaming is atomic."""
    name = TEMPORARY_PREFIX + path.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = TEMPORARY_PREFIX + hashlib.sha256(os.fsencode(path.name)).hexdigest()
    return path.with_name(name)


def publish(path: pathlib.Path) -> None:
    """Renames a temporary file, already flushed to the disk, to its final name, and flushes the folder."""
    temporary_path(path).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with about(path.parent):
            os.fsync(folder)
    finally:
        os.close(folder)


class NewFile(OpenFile):
    """A file that is being written under its temporary name. It is created here, so nothing is written through a link.

    Arguments:
        path: the final path. A file that already has the temporary name is removed first.

    Raises:
        OSError: it cannot be created, or somebody else created a file of this name just now.
    """

    def __init__(self, path: pathlib.Path):
        temporary = temporary_path(path)
        temporary.unlink(missing_ok=True)
        super().__init__(path, os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))

    def put_on_disk(self) -> None:
        """Flushes the file before it is published. Raises CheckpointError if somebody put another file in its place."""
        with about(self.path):
            os.fsync(self.descriptor)
        temporary = temporary_path(self.path)
        if not os.path.samestat(os.fstat(self.descriptor), temporary.lstat()):
            raise CheckpointError(f"{temporary}: is not the file that was written; somebody else writes to this folder")

    def abandon(self) -> None:
        """Closes the file, and removes it if it did not get its name."""
        self.close()
        temporary_path(self.path).unlink(missing_ok=True)


class FilledFile(abc.ABC):
    """A file of a size that is known beforehand, and whose tensors are written to their places in any order.

    As a context manager it gets its name when the block ends, and is removed when the block raises.

    Arguments:
        path: the final path.
        prefix: the first bytes.
        size: bytes of the whole file.
    """

    def __init__(self, path: pathlib.Path, prefix: bytes, size: int):
        self.path = path
        self._file = NewFile(path)
        try:
            with about(path):
                os.truncate(self._file.descriptor, size)
            self._file.write(0, memoryview(prefix))
        except BaseException:
            self.abandon()
            raise

    @abc.abstractmethod
    def unwritten(self) -> Collection[str]:
        """Names of the tensors that are not written, or not whole."""

    def commit(self) -> None:
        """Flushes the file to the disk and gives it its name; removes it if that fails."""
        try:
            if missing := self.unwritten():
                raise CheckpointError(f"{self.path}: {len(missing)} tensors were not written: {min(missing)}")
            self._file.put_on_disk()
            publish(self.path)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file, and removes it if it did not get its name."""
        self._file.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abandon()


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[NewFile]:
    """Yields the file to write. It gets its name when the block ends, and is removed when the block raises."""
    file = NewFile(path)
    try:
        yield file
        file.put_on_disk()
        publish(path)
    finally:
        file.abandon()


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file with `written_whole`. Raises CheckpointError for NaN, infinity and text that is not UTF-8."""
    try:
        data = (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except ValueError as error:
        raise CheckpointError(f"{path}: would not be JSON in UTF-8: {error}") from None
    with written_whole(path) as file:
        file.write(0, memoryview(data))


def read_json(path: pathlib.Path) -> Any:
    """A JSON file's content.

    Raises:
        CheckpointError: it is missing, not a file, larger than 100 MB, or not JSON.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes; needs at most {_MAX_JSON_BYTES} of a JSON file")
    return load_json(str(path), path.read_bytes(), finite=True)


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The content of a JSON file that must hold an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: needs a JSON object, holds a {type(content).__name__}")
    return content


def copy_whole(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Copies a file (a link's target), with its time and permissions; the copy appears complete or not at all.

    Raises:
        CheckpointError: the source is not a regular file, or becomes shorter.
    """
    opened = OpenFile(source, os.open(source, os.O_RDONLY | os.O_NONBLOCK))  # does not wait for the writer of a pipe
    try:
        status = os.fstat(opened.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                f"{source}: is not a regular file, and only those are copied; remove it from the checkpoint"
            )
        with written_whole(destination) as file:
            copy_range(opened, 0, file, 0, status.st_size)
            with about(destination):
                os.fchmod(file.descriptor, status.st_mode & 0o777)
                os.utime(file.descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
    finally:
        opened.close()
