"""A folder of versions on a disk that trainer and engines share: names, locks, and what a version says of itself.

    v000007/         a complete version: safetensors files as Hugging Face has them, and manifest.json
    v000008-delta/   what changed since the version before
    .lock            held by the trainer that writes

A version gets its name when all of it is on the disk, and never changes afterwards: what has a name is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from jaxlowprec.checkpoints.files import TEMPORARY_PREFIX, temporary_path

LOCK = ".lock"

_NAME = re.compile(r"v(\d{6,19})(-delta)?")


def folder_name(version: int, delta: bool = False) -> str:
    """A version's name.

    >>> folder_name(7), folder_name(8, delta=True)
    ('v000007', 'v000008-delta')
    """
    return f"v{version:06}" + "-delta" * delta


def versions(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """The versions that a folder holds, oldest first; a complete one goes before a delta of the same number.

    >>> versions(pathlib.Path("/nowhere"))
    {}
    """
    found: dict[int, pathlib.Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(path.iterdir(), reverse=True):
            if match := _NAME.fullmatch(entry.name):
                found[int(match[1])] = entry
    return dict(sorted(found.items()))


def is_delta(folder: pathlib.Path) -> bool:
    """Whether a version is what changed, after its name.

    >>> is_delta(pathlib.Path("v000008-delta"))
    True
    """
    return folder.name.endswith("-delta")


def publish(folder: pathlib.Path) -> None:
    """Gives a version, written in full under its temporary name, its name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     folder = pathlib.Path(path, folder_name(7))
    ...     temporary_path(folder).mkdir()
    ...     publish(folder)
    ...     versions(folder.parent) == {7: folder}
    True
    """
    sync_folder(temporary_path(folder))
    temporary_path(folder).rename(folder)
    sync_folder(folder.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Puts a folder's list of files on the disk.

    >>> sync_folder(pathlib.Path("."))
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def being_read(folder: pathlib.Path) -> Iterator[None]:
    """Keeps a version from being pruned. Raises FileNotFoundError if it is gone.

    >>> with being_read(pathlib.Path("v000001")):
    ...     pass
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'v000001'
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: an unlinked file stays readable
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if folder.stat().st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(f"{folder}: was pruned")
        yield
    finally:
        os.close(descriptor)


def prune(path: pathlib.Path, keep: int) -> list[pathlib.Path]:
    """Removes versions older than the `keep`-th newest complete one, but none that is being read.

    Returns what it removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     for name in ("v000001", "v000002-delta", "v000003", "v000004", "v000005-delta"):
    ...         pathlib.Path(path, name).mkdir()
    ...     with being_read(pathlib.Path(path, "v000001")):
    ...         [folder.name for folder in prune(pathlib.Path(path), keep=2)]
    ['v000002-delta']
    """
    found = versions(path)
    complete = [number for number, folder in found.items() if not is_delta(folder)]
    if len(complete) <= keep:
        return []
    return [folder for number, folder in found.items() if number < complete[-keep] and _remove(folder)]


def _remove(folder: pathlib.Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # somebody else removed it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.rename(temporary_path(folder))  # nobody sees half of it
    except OSError:  # it is being read
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(temporary_path(folder), ignore_errors=True)
    return True


def remove_unfinished(path: pathlib.Path) -> None:
    """Removes what trainers that were killed have left.

    >>> remove_unfinished(pathlib.Path("/nowhere"))
    """
    for entry in path.glob(TEMPORARY_PREFIX + "v*"):
        shutil.rmtree(entry, ignore_errors=True)
