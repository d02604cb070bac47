"""Folders that hold files and folders and nothing else: what is written there goes nowhere else through a link.

Somebody may have put links into a folder before. Who may write into it while it is being written can still exchange
whole folders; nothing is promised against that.
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
    """What lies in a folder and below, with its status; links are not followed.

    Arguments:
        folder: that exists.
        enter: whether to look into a folder below.

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
    """Whether an entry is what a writer that was killed may have left: no folder, under a temporary name."""
    return path.name.startswith(TEMPORARY_PREFIX) and not stat.S_ISDIR(status.st_mode)


def remove_temporaries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Removes what writers that were killed have left in a folder and below; returns what it removed.

    Of a link that lies in such a place the link goes, and what it points to stays.
    """
    left = [path for path, status in entries(folder) if is_leftover(path, status)]
    for path in left:
        path.unlink()
    return left


def require_plain(folder: pathlib.Path) -> None:
    """Raises CheckpointError if there is a link, a pipe or a device in a folder or below."""
    for path, status in entries(folder):
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            kind = "a link" if stat.S_ISLNK(status.st_mode) else "no file"
            raise CheckpointError(f"{path}: is {kind}, which no conversion makes; remove it, or choose another folder")


def make_folder_in(root: pathlib.Path, relative: pathlib.Path) -> None:
    """Makes a folder and those above it up to `root`, which is there. Raises CheckpointError for a link among them."""
    for part in relative.parts:
        root = root / part
        with contextlib.suppress(FileExistsError):
            root.mkdir()
        if not stat.S_ISDIR(root.lstat().st_mode):
            raise CheckpointError(f"{root}: is a link or a file; a folder of this name is to be made there")
