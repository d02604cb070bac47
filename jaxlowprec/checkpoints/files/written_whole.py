"""Files that appear whole or not at all: written under a temporary name in their folder, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.file_bytes import OpenFile, about, copy_range
from jaxlowprec.checkpoints.files.safetensors_header import MAX_HEADER_BYTES
from jaxlowprec.checkpoints.files.strict_json import load_json

TEMPORARY_PREFIX = ".jaxlowprec-writing-"
_MAX_JSON_BYTES = MAX_HEADER_BYTES  # an index names the tensors that headers do
_LONGEST_NAME = 255  # bytes that file systems take


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Where a file is written before it gets its name: in the same folder, so that renaming is atomic."""
    name = TEMPORARY_PREFIX + path.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = TEMPORARY_PREFIX + hashlib.sha256(os.fsencode(path.name)).hexdigest()
    return path.with_name(name)


def publish(path: pathlib.Path) -> None:
    """Gives a temporary file, already on the disk, its name, and puts the folder on the disk."""
    temporary_path(path).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with about(path.parent):
            os.fsync(folder)
    finally:
        os.close(folder)


class NewFile(OpenFile):
    """A file that is being written under its temporary name: made here, so that nothing is written through a link.

    Arguments:
        path: that it will have. What lies under the temporary name is removed first.

    Raises:
        OSError: it cannot be made, or somebody else made one of this name just now.
    """

    def __init__(self, path: pathlib.Path):
        temporary = temporary_path(path)
        temporary.unlink(missing_ok=True)
        super().__init__(path, os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))

    def put_on_disk(self) -> None:
        """Before it is published. Raises CheckpointError if somebody put another file in its place."""
        with about(self.path):
            os.fsync(self.descriptor)
        temporary = temporary_path(self.path)
        if not os.path.samestat(os.fstat(self.descriptor), temporary.lstat()):
            raise CheckpointError(f"{temporary}: is not the file that was written; somebody else writes to this folder")

    def abandon(self) -> None:
        """Closes the file, and removes it if it has not got its name."""
        self.close()
        temporary_path(self.path).unlink(missing_ok=True)


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[NewFile]:
    """The file to write; it gets its name when the block ends, and is removed when the block raises."""
    file = NewFile(path)
    try:
        yield file
        file.put_on_disk()
        publish(path)
    finally:
        file.abandon()


def write_json(path: pathlib.Path, content: Any) -> None:
    """A JSON file, written whole."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with written_whole(path) as file:
        file.write(0, memoryview(text.encode()))


def read_json(path: pathlib.Path) -> Any:
    """A JSON file's content.

    Raises:
        CheckpointError: it is missing, not a file, larger than 100 MB, or no JSON.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes; needs at most {_MAX_JSON_BYTES} of a JSON file")
    return load_json(str(path), path.read_bytes(), finite=True)


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The same, of a file that must hold an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: needs a JSON object, holds a {type(content).__name__}")
    return content


def copy_whole(source: pathlib.Path, destination: pathlib.Path) -> None:
    """A copy of a file (of what a link points to), with its time and permissions, written whole.

    Raises:
        CheckpointError: the source is no regular file, or becomes shorter.
    """
    opened = OpenFile(source, os.open(source, os.O_RDONLY | os.O_NONBLOCK))  # a pipe must not wait for its writer
    try:
        status = os.fstat(opened.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{source}: is no file that can be copied")
        with written_whole(destination) as file:
            copy_range(opened, 0, file, 0, status.st_size)
            with about(destination):
                os.fchmod(file.descriptor, status.st_mode & 0o777)
                os.utime(file.descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
    finally:
        opened.close()
