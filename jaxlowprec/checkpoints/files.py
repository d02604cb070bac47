"""Files that appear whole or not at all: written under a temporary name in their folder, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.strict_json import load_json

TEMPORARY_PREFIX = ".jaxlowprec-writing-"
_MAX_JSON_BYTES = 1 << 30


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Where a file is written before it gets its name: in the same folder, so that renaming is atomic."""
    return path.with_name(TEMPORARY_PREFIX + path.name)


def publish(path: pathlib.Path) -> None:
    """Gives a temporary file, already on the disk, its name, and puts the folder on the disk."""
    temporary_path(path).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The temporary file to write; it gets its name when the block ends, and is removed when the block raises."""
    temporary = temporary_path(path)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        publish(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: pathlib.Path, content: Any) -> None:
    """A JSON file, written whole."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: pathlib.Path) -> Any:
    """A JSON file's content.

    Raises:
        CheckpointError: it is missing, not a file, larger than 1 GiB, or no JSON.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes; needs at most {_MAX_JSON_BYTES} of a JSON file")
    return load_json(str(path), path.read_bytes())


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The same, of a file that must hold an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: needs a JSON object, holds a {type(content).__name__}")
    return content


def copy_whole(source: pathlib.Path, destination: pathlib.Path) -> None:
    """A copy of a file (of what a link points to), with its time and mode, written whole."""
    with written_whole(destination) as temporary:
        shutil.copy2(source, temporary)


def remove_temporaries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Removes what writers that were killed have left in a folder and below; returns what it removed."""
    left = sorted(p for p in folder.rglob(TEMPORARY_PREFIX + "*") if p.is_file() and not p.is_symlink())
    for path in left:
        path.unlink()
    return left
