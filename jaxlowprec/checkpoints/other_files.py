"""The files of a checkpoint that are not its weights: copied with it."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Collection

from jaxlowprec.checkpoints.files import copy_whole
from jaxlowprec.checkpoints.folder import CONFIG_FILE, INDEX_FILE, CheckpointFolder
from jaxlowprec.checkpoints.plain_folders import make_folder_in

_OTHER_WEIGHTS = re.compile(
    r"(.*\.safetensors(\.index\.json)?|(pytorch|tf|flax)_model.*|consolidated.*|.*\.(pth|gguf))", re.IGNORECASE
)
_NOT_CONTENT = {".git", ".cache", ".gitattributes"}


def other_files(source: CheckpointFolder, drop: Collection[str] = ()) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Relative paths of the files to copy, and of those to leave out.

    Left out are the same weights in other files, which would be wrong beside the new ones, what `drop` names, and the
    bookkeeping of git and of download caches. Subfolders are copied whole; links to files count as files.
    """
    taken = {pathlib.Path(name) for name in (*source.shards, CONFIG_FILE, INDEX_FILE)}
    copied: list[pathlib.Path] = []
    left_out: list[pathlib.Path] = []
    for folder, folders, files in os.walk(source.path):
        here = pathlib.Path(folder).relative_to(source.path)
        for name in sorted(folders):
            if name in _NOT_CONTENT or (source.path / here / name).is_symlink():
                folders.remove(name)
                left_out.append(here / name)
        for name in files:
            path = here / name
            if path in taken:
                continue
            other = here == pathlib.Path() and (_OTHER_WEIGHTS.fullmatch(name) or name in drop)
            unusual = name in _NOT_CONTENT or not (source.path / path).is_file()
            (left_out if other or unusual else copied).append(path)
    return sorted(copied), sorted(left_out)


def copy_files(source: pathlib.Path, destination: pathlib.Path, paths: Collection[pathlib.Path]) -> None:
    """Copies files by their relative paths."""
    for path in paths:
        make_folder_in(destination, path.parent)
        copy_whole(source / path, destination / path)
