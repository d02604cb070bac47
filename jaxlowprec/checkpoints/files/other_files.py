"""The files of a checkpoint other than its weights, which are copied with it."""

from __future__ import annotations

import pathlib
import re
import stat
from collections.abc import Collection

from jaxlowprec.checkpoints.conversion.resume import MANIFEST
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, INDEX_FILE, CheckpointFolder, real_path
from jaxlowprec.checkpoints.files.plain_folders import entries, make_folder_in
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX, copy_whole

_OTHER_WEIGHTS = re.compile(
    r"(.*\.safetensors(\.index\.json)?|(pytorch|tf|flax)_model.*|consolidated.*|.*\.(pth|gguf))", re.IGNORECASE
)
_NOT_CONTENT = {".git", ".cache", ".gitattributes"}


def other_files(source: CheckpointFolder, drop: Collection[str] = ()) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Relative paths of the files to copy, and of those to leave out.

    Left out are copies of the weights in other files, which would be wrong beside the new weights, the names in `drop`,
    and the bookkeeping of git, download caches and conversions. Subfolders are copied whole, links as files.

    Raises:
        OSError: a folder cannot be read.
    """
    taken = {pathlib.Path(name) for name in own_files(source)}
    copied: list[pathlib.Path] = []
    left_out: list[pathlib.Path] = []
    for full, status in entries(source.path, enter=lambda folder: folder.name not in _NOT_CONTENT):
        path = full.relative_to(source.path)
        if path in taken or (stat.S_ISDIR(status.st_mode) and path.name not in _NOT_CONTENT):
            continue
        at_top = path.parent == pathlib.Path()
        other = at_top and (_OTHER_WEIGHTS.fullmatch(path.name) or path.name in drop or path.name == MANIFEST)
        unusual = path.name in _NOT_CONTENT or path.name.startswith(TEMPORARY_PREFIX) or not full.is_file()
        (left_out if other or unusual else copied).append(path)
    return sorted(copied), sorted(left_out)


def own_files(source: CheckpointFolder) -> list[str]:
    """Names of the files that a checkpoint consists of, if they exist."""
    return [*source.shards, *(name for name in (CONFIG_FILE, INDEX_FILE) if (source.path / name).is_file())]


def copy_files(
    source: pathlib.Path, destination: pathlib.Path, paths: Collection[pathlib.Path], follow_links: bool = False
) -> None:
    """Copies files by their relative paths. Raises CheckpointError as `real_path` does."""
    for path in paths:
        make_folder_in(destination, path.parent)
        copy_whole(real_path(source, path, follow_links), destination / path)
