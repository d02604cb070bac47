"""A checkpoint's folder: its config, and its tensors in one safetensors file, or in several with an index.

A file outside the folder is not part of it, and is copied only if asked for. Otherwise, whoever can put a link into a
folder that somebody else converts could get any file copied that the other person may read.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsFile
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.files.written_whole import read_json_object, write_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_SAVE_AGAIN = "only safetensors are read; load the model in transformers, and save it with save_pretrained"
_REMEDIES = {
    ".safetensors": f"needs {INDEX_FILE} beside several files, or one file with the name {SINGLE_FILE}",
    ".bin": _SAVE_AGAIN,
    ".pth": _SAVE_AGAIN,
    ".pt": _SAVE_AGAIN,
    ".gguf": "give the path of that file",
}

_LONGEST_NAME = 255  # bytes: the limit of file systems


class CheckpointFolder:
    """A checkpoint, open for reading. Every header is read and checked; no tensor is read yet.

    Attributes:
        path: the folder's path.
        indexed: whether it has an index file.
        shards: maps file names to open files, in the order of the names.
        shard_of: maps tensor names to the names of the files that hold them.

    Raises:
        CheckpointError: there is no checkpoint, a file is missing or wrong, or index and files disagree.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        require_folder(self.path)
        self.indexed = (self.path / INDEX_FILE).exists()
        weight_map = read_index(self.path / INDEX_FILE) if self.indexed else None
        names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
        for name in names:
            if not (self.path / name).is_file():
                why = f"{INDEX_FILE} names it" if self.indexed else f"and the folder has no index{_others(self.path)}"
                raise CheckpointError(f"{self.path / name}: no such file ({why})")
        self.shards: dict[str, SafetensorsFile] = {}
        try:
            for name in names:
                self.shards[name] = SafetensorsFile(self.path / name)
            self.shard_of = self._shard_of(weight_map)
        except BaseException:
            self.close()
            raise

    def _shard_of(self, weight_map: Mapping[str, str] | None) -> dict[str, str]:
        """Maps tensors to files, from the files' headers; the index must say the same."""
        found: dict[str, str] = {}
        for shard, file in self.shards.items():
            for name in file.header.tensors:
                if name in found:
                    raise CheckpointError(f"{self.path}: tensor {name!r} is in {found[name]} and in {shard}")
                found[name] = shard
        if weight_map is None:
            return found
        for name, shard in weight_map.items():
            if found.get(name) != shard:
                place = f"it is in {found[name]}" if name in found else "it is in no file"
                raise CheckpointError(f"{self.path / INDEX_FILE}: tensor {name!r} should be in {shard}; {place}")
        if unlisted := sorted(set(found) - set(weight_map)):
            raise CheckpointError(
                f"{self.path / INDEX_FILE}: does not list {len(unlisted)} tensors of its files, such as "
                f"{unlisted[0]!r} in {found[unlisted[0]]}"
            )
        return found

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json_object(self.path / CONFIG_FILE)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor."""
        return self.file_of(name).header.tensors[name].spec

    def file_of(self, name: str) -> SafetensorsFile:
        """The open file that holds a tensor."""
        try:
            return self.shards[self.shard_of[name]]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name!r}") from None

    def read(self, name: str) -> np.ndarray:
        """A tensor's array."""
        return self.file_of(name).read(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.spec.nbytes for file in self.shards.values() for entry in file.header.tensors.values())

    def close(self) -> None:
        """Closes the files."""
        for file in self.shards.values():
            file.close()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LazyTensors(Mapping[str, np.ndarray]):
    """A checkpoint's tensors by their names. Each access reads the tensor from its file again."""

    def __init__(self, folder: CheckpointFolder):
        self._folder = folder

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._folder.shard_of:
            raise KeyError(name)
        return self._folder.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._folder.shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._folder.shard_of)

    def __len__(self) -> int:
        return len(self._folder.shard_of)


def require_folder(path: pathlib.Path) -> None:
    """Raises CheckpointError unless a path is that of a folder."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {found}; needs a folder with {SINGLE_FILE} or {INDEX_FILE}")


def _others(path: pathlib.Path) -> str:
    """The weights of other kinds in a folder without readable safetensors files, and their remedy; or ""."""
    for suffix, remedy in _REMEDIES.items():
        if found := sorted(file.name for file in path.glob(f"*{suffix}")):
            return f", but {found[0]}: {remedy}"
    return ""


def read_index(path: pathlib.Path) -> dict[str, str]:
    """An index file's map from tensors to files; the file names are safe to join with the folder's path.

    Raises:
        CheckpointError: the file is not an index, or names a file outside its own folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: needs a weight_map of tensor names and file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _plain_file_name(shard):
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to be in {shard!r}; needs the plain name of a .safetensors file"
            )
    return weight_map


def write_index(folder: pathlib.Path, shard_of: Mapping[str, str], total_size: int) -> None:
    """Writes the index of a folder. `total_size`: the bytes of all tensors."""
    weight_map = {name: shard_of[name] for name in sorted(shard_of)}
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _plain_file_name(name: str) -> bool:
    """Whether a name is that of a safetensors file and not a path, so that it cannot lead out of its folder."""
    plain = not name.startswith(".") and not set(name) & set("/\\:\0")
    return name.endswith(".safetensors") and plain and len(os.fsencode(name)) <= _LONGEST_NAME


def real_path(source: pathlib.Path, relative: pathlib.Path, follow_links: bool = False) -> pathlib.Path:
    """The real path of a file of a checkpoint.

    In Hugging Face's cache, the files of `snapshots/<revision>` are links to `blobs`, which belongs to the checkpoint.

    Arguments:
        source: the checkpoint's folder.
        relative: path of the file in it.
        follow_links: allow links that point anywhere.

    Raises:
        CheckpointError: it lies outside of the checkpoint.
    """
    root, real = (pathlib.Path(os.path.realpath(path)) for path in (source, source / relative))
    inside = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not follow_links and not any(real.is_relative_to(folder) for folder in inside):
        raise CheckpointError(
            f"{source / relative}: is a link to {real}, which is outside of the checkpoint and would be copied; put "
            "the file itself there, or say that links may be followed (--follow-links)"
        )
    return real
