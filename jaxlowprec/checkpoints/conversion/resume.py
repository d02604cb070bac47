"""Claims a destination folder for one conversion until it is done, so that a killed conversion can be continued.

While a conversion runs, its folder holds `MANIFEST`, which says what is converted and how. Files get their names only
when they are complete and on the disk, so a file with its final name is finished. The manifest is removed last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import CONFIG_FILE, INDEX_FILE, CheckpointFolder
from jaxlowprec.checkpoints.files.open_files import about
from jaxlowprec.checkpoints.files.plain_folders import is_leftover, remove_temporaries, require_plain
from jaxlowprec.checkpoints.files.written_whole import read_json_object, write_json

MANIFEST = ".jaxlowprec-conversion.json"
_VERSION = 1


def fingerprint(source: CheckpointFolder, options: dict[str, Any]) -> dict[str, Any]:
    """The source and the options of a conversion as JSON: equal for two runs that would write the same bytes.

    A file of weights is represented by its size, its time and its header's bytes, which can be read quickly.
    """
    files = {}
    for name, file in source.shards.items():
        status = file.path.stat()
        data_start = min((entry.offset for entry in file.header.tensors.values()), default=file.header.size)
        with file.path.open("rb") as opened:
            header = hashlib.sha256(opened.read(data_start)).hexdigest()
        files[name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "header_sha256": header}
    for name in (CONFIG_FILE, INDEX_FILE):
        if (source.path / name).is_file():
            files[name] = {"sha256": hashlib.sha256((source.path / name).read_bytes()).hexdigest()}
    return {"version": _VERSION, "options": options, "source_files": files}


def check_unchanged(source: CheckpointFolder, wanted: dict[str, Any]) -> None:
    """Raises CheckpointError if a source is not what it was when its fingerprint was taken."""
    now = fingerprint(source, wanted["options"])
    if now != wanted:
        raise CheckpointError(
            f"{source.path}: changed while it was converted ({_difference(wanted, now)}); remove what was written, and "
            "convert again when nothing writes to the source"
        )


def check_apart(source: pathlib.Path, destination: pathlib.Path) -> None:
    """Raises CheckpointError if one folder is, or lies in, the other."""
    with about(destination):
        a, b = (pathlib.Path(os.path.realpath(path)) for path in (source, destination))  # links may be circular
    if a == b or a in b.parents or b in a.parents:
        raise CheckpointError(f"{destination}: is, holds, or lies in the source {source}; needs a folder of its own")


@contextlib.contextmanager
def claimed(destination: pathlib.Path, wanted: dict[str, Any]) -> Iterator[bool]:
    """Claims a destination for one conversion: a new or empty folder, or one that the same conversion left unfinished.

    Yields whether an unfinished conversion is continued. Leftovers of killed writers are removed first. The manifest is
    removed when the block ends, and stays when the block raises, unless that is a CheckpointError and nothing has been
    written: then another conversion may have the folder, and a folder that was made here is removed.

    Raises:
        CheckpointError: the folder holds anything else, or links, also at the end; or another process is working in it.
    """
    check_claim(destination, wanted)
    made = not destination.exists()
    destination.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(destination, os.O_RDONLY)
    try:
        try:
            with about(destination):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{destination}: another conversion is at work in this folder") from None
        resumed = check_claim(destination, wanted)
        remove_temporaries(destination)
        require_plain(destination)
        if not resumed:
            write_json(destination / MANIFEST, wanted)
        try:
            yield resumed
        except CheckpointError:
            if not resumed:
                _give_up_empty(destination, made)
            raise
        remove_temporaries(destination)
        require_plain(destination)
        (destination / MANIFEST).unlink()
        with about(destination):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)  # also releases the lock


def _give_up_empty(destination: pathlib.Path, made: bool) -> None:
    """Removes the manifest if the folder holds nothing else; also the folder, if it was made for this conversion."""
    remove_temporaries(destination)
    if [path.name for path in destination.iterdir()] == [MANIFEST]:
        (destination / MANIFEST).unlink()
        if made:
            destination.rmdir()


def check_claim(destination: pathlib.Path, wanted: dict[str, Any]) -> bool:
    """Whether a folder holds the same conversion, unfinished. Raises CheckpointError if it holds anything else."""
    if not destination.exists():
        return False
    if not destination.is_dir():
        raise CheckpointError(f"{destination}: is not a folder; choose another path")
    if not (destination / MANIFEST).exists():
        if any(not is_leftover(path, path.lstat()) for path in destination.iterdir()):
            raise CheckpointError(
                f"{destination}: is not empty, and holds no unfinished conversion; choose another folder"
            )
        return False
    found = read_json_object(destination / MANIFEST)
    if found != wanted:
        raise CheckpointError(
            f"{destination}: holds another unfinished conversion ({_difference(found, wanted)}); finish that one, "
            "remove the folder, or choose another"
        )
    return True


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first thing in which two fingerprints differ."""
    for section in ("version", "options", "source_files"):
        a, b = found.get(section), wanted[section]
        if not isinstance(a, dict) or not isinstance(b, dict):
            if a != b:
                return f"{section}: {a!r} there, {b!r} now"
            continue
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                changed = f"{a.get(key)!r} there, {b.get(key)!r} now" if section == "options" else "it changed since"
                return f"{key}: {changed}"
    return "its manifest is damaged"
