"""Folders that hold only files and folders, so that nothing is written elsewhere through a link.

Links may have been put into a folder beforehand. Whoever may write into it while it is being written can still
exchange whole folders; nothing is promised against that.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Callable, Iterator

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX


def entries(
    folder: pathlib.Path, enter: Callable[[pathlib.Path], bool] = lambda path: True
) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
    """Yields what is in a folder and below it, with its status; links are not followed.

    Arguments:
        folder: an existing folder.
        enter: says whether to look into a subfolder.

    Raises:
        OSError: a folder cannot be read.
    """
    left = [folder]
    while left:
        for path in sorted(left.pop().iterdir()):
            status = path.lstat()
            yield path, status
            if stat.S_ISDIR(status.st_mode) and enter(path):
                left.append(path)


def is_leftover(path: pathlib.Path, status: os.stat_result) -> bool:
    """Whether an entry may be left over from a killed writer: not a folder, and under a temporary name."""
    return path.name.startswith(TEMPORARY_PREFIX) and not stat.S_ISDIR(status.st_mode)


def remove_temporaries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Removes what killed writers left in a folder and below it; returns what it removed.

    A link in such a place is removed; the file that it points to stays.
    """
    left = [path for path, status in entries(folder) if is_leftover(path, status)]
    for path in left:
        path.unlink()
    return left


def require_plain(folder: pathlib.Path) -> None:
    """Raises CheckpointError if there is a link, a pipe or a device in a folder or below it."""
    for path, status in entries(folder):
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            kind = "a link" if stat.S_ISLNK(status.st_mode) else "no file"
            raise CheckpointError(f"{path}: is {kind}, which no conversion makes; remove it, or choose another folder")


def make_folder_in(root: pathlib.Path, relative: pathlib.Path) -> None:
    """Makes a folder and its missing parents below `root`, which exists. Raises CheckpointError for a link there."""
    for part in relative.parts:
        root = root / part
        with contextlib.suppress(FileExistsError):
            root.mkdir()
        if not stat.S_ISDIR(root.lstat().st_mode):
            raise CheckpointError(f"{root}: is a link or a file; a folder of this name is to be made there")
