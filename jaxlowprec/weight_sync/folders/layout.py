"""The layout of a folder of versions on a disk that trainer and engines share: names, locks, records and pruning.

    v000007/         a complete version: safetensors files as Hugging Face has them, and manifest.json
    v000008-delta/   what changed since the previous version
    .lock            held by the trainer that writes

A version gets its name when all of it is on the disk, and never changes afterwards: a folder with such a name is
complete. A link or a file with such a name is not a version. No link within the folder of versions is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.written_whole import TEMPORARY_PREFIX, read_json_object, temporary_path, write_json
from jaxlowprec.weight_sync.bucket import MAX_VERSION, BucketHeader, checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.manifest import Manifest

LOCK = ".lock"

_NAME = re.compile(r"v([0-9]{6,19})(-delta)?")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LOG = logging.getLogger(__name__)

RECORD_FILE = "manifest.json"
_FORMAT = 1
_FIELDS = {"format", "version", "base_version", "files", "manifest", "buckets", "before", "after", "checksum"}


def folder_name(version: int, delta: bool = False) -> str:
    """The name of a version's folder.

    >>> folder_name(7), folder_name(8, delta=True)
    ('v000007', 'v000008-delta')
    """
    return f"v{version:06}" + "-delta" * delta


def versions(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """The versions in a folder, oldest first; a complete one comes before a delta of the same number.

    Raises:
        Refused: the folder cannot be listed; a missing folder has no versions.

    >>> versions(pathlib.Path("/nowhere"))
    {}
    """
    try:
        with os.scandir(path) as entries:
            names = sorted((entry.name for entry in entries if _is_version(entry)), reverse=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; needs the folder of versions") from error
    found = {int(name[1:].removesuffix("-delta")): path / name for name in names}
    return dict(sorted(found.items()))


def _is_version(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder with a name that `folder_name` gives."""
    match = _NAME.fullmatch(entry.name)
    if match is None or not entry.is_dir(follow_symlinks=False):
        return False
    number = int(match[1])
    return 1 <= number <= MAX_VERSION and entry.name == folder_name(number, match[2] is not None)


def is_delta(folder: pathlib.Path) -> bool:
    """Whether a version is a delta, by its name.

    >>> is_delta(pathlib.Path("v000008-delta"))
    True
    """
    return folder.name.endswith("-delta")


def unfinished(folder: pathlib.Path) -> pathlib.Path:
    """A new folder, in which a version is written before it gets its name.

    Arguments:
        folder: the version's final folder. The new one is made beside it.

    Raises:
        Refused: something that is not a version has the version's name. OSError: the folder cannot be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     folder = pathlib.Path(path, folder_name(7))
    ...     publish(unfinished(folder), folder)
    ...     versions(folder.parent) == {7: folder}
    True
    """
    if folder.is_symlink() or folder.exists():
        raise Refused(f"{folder}: is there already, and is not a version; remove it")
    try:
        temporary_path(folder).mkdir()
    except FileExistsError:  # left by a killed trainer or put there by somebody, and it could not be removed
        other = _unlikely(folder)
        other.mkdir()
        return other
    return temporary_path(folder)


def publish(written: pathlib.Path, folder: pathlib.Path) -> None:
    """Gives a version, completely written in an `unfinished` folder, its name."""
    sync_folder(written)
    written.rename(folder)
    sync_folder(folder.parent)


def _unlikely(folder: pathlib.Path) -> pathlib.Path:
    """A temporary path that does not exist."""
    return temporary_path(folder).with_name(f"{temporary_path(folder).name}.{secrets.token_hex(8)}")


def sync_folder(folder: pathlib.Path) -> None:
    """Flushes a folder's list of files to the disk.

    >>> sync_folder(pathlib.Path("."))
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
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
    descriptor = os.open(folder, _FOLDER)
    try:
        with contextlib.suppress(OSError):  # without locks in the file system: an unlinked file stays readable
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not os.path.samestat(folder.lstat(), os.fstat(descriptor)):
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
        descriptor = os.open(folder, _FOLDER)
    except OSError:  # somebody else removed it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        condemned = folder.rename(_unlikely(folder))  # so that nobody sees half of it
    except OSError:  # it is being read
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(condemned, ignore_errors=True)
    return True


def remove_unfinished(path: pathlib.Path) -> None:
    """Removes what killed trainers have left, and anything else with such a name; no link is followed.

    >>> remove_unfinished(pathlib.Path("/nowhere"))
    """
    for entry in path.glob(TEMPORARY_PREFIX + "v*"):
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("weight sync: %s is left over and cannot be removed: %s", entry, error.strerror)


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of a version's `manifest.json`.

    Attributes:
        version: its number.
        base_version: the version that a delta changes; None: the version is complete.
        files: the number of a delta's files.
        manifest: all tensors of the version, changed or not.
        buckets: the headers under which it was sent, with checksums of the complete bytes.
        before, after: checksum of each tensor's bytes in a delta's base version, and in this version.

    >>> record = Record(1, None, 0, Manifest(()), (), {}, {})
    >>> Record.from_json(record.to_json()) == record
    True
    """

    version: int
    base_version: int | None
    files: int
    manifest: Manifest
    buckets: tuple[BucketHeader, ...]
    before: dict[str, str]
    after: dict[str, str]

    def to_json(self) -> dict[str, object]:
        """The record as JSON for `from_json`, with a checksum of itself."""
        content: dict[str, object] = {
            "format": _FORMAT,
            "version": self.version,
            "base_version": self.base_version,
            "files": self.files,
            "manifest": json.loads(self.manifest.to_json()),
            "buckets": [json.loads(header.to_json()) for header in self.buckets],
            "before": self.before,
            "after": self.after,
        }
        return {**content, "checksum": _checksum(content)}

    @classmethod
    def from_json(cls, content: dict[str, object]) -> Record:
        """The inverse of `to_json`. Raises ValueError for anything that `to_json` does not give."""
        if set(content) != _FIELDS or type(content["format"]) is not int or content["format"] != _FORMAT:
            raise ValueError(
                f"it has {brief(sorted(content))}, format {brief(content.get('format'))}; this version reads {_FORMAT}"
            )
        if _checksum({name: value for name, value in content.items() if name != "checksum"}) != content["checksum"]:
            raise ValueError("it is damaged: its checksum is wrong")
        version, base, files = (content[name] for name in ("version", "base_version", "files"))
        if type(version) is not int or not 1 <= version <= MAX_VERSION:
            raise ValueError("version must be a whole number from 1")
        if base is not None and (type(base) is not int or not 1 <= base < version):
            raise ValueError("base_version must be null, or an earlier version's number")
        manifest = Manifest.from_json(json.dumps(content["manifest"]).encode())
        before = _checksums(content["before"], {} if base is None else manifest.by_name)
        after = _checksums(content["after"], manifest.by_name)
        if not isinstance(content["buckets"], list):
            raise ValueError("buckets must be a list of headers")
        headers = tuple(BucketHeader.from_json(json.dumps(header).encode()) for header in content["buckets"])
        held = [placed.entry.name for header in headers for placed in header.entries]
        if len(held) != len(manifest.entries) or set(held) != manifest.by_name.keys():
            raise ValueError("buckets must hold each tensor of the manifest once")
        if type(files) is not int or not 0 <= files <= (0 if base is None else len(headers)):
            raise ValueError("files must be how many of a delta's buckets changed, and 0 of a complete version")
        return cls(version, base, files, manifest, headers, before, after)


def _checksums(given: object, of: Mapping[str, object]) -> dict[str, str]:
    """The given checksums. Raises ValueError unless there is one for each of the tensors."""
    if not isinstance(given, dict) or given.keys() != of.keys() or not all(isinstance(c, str) for c in given.values()):
        raise ValueError("before and after must map tensors to checksums")
    return given


def _checksum(content: dict[str, object]) -> str:
    return checksum(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())


def read_record(folder: pathlib.Path) -> Record:
    """The record of a version.

    Raises:
        Refused: its manifest is missing, damaged, or that of another version.

    >>> read_record(pathlib.Path("v000001"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.Refused: v000001: v000001/manifest.json: no such file; publish another ...
    """
    with refusing(folder):
        record = Record.from_json(read_json_object(folder / RECORD_FILE))
        if folder.name != folder_name(record.version, record.base_version is not None):
            raise ValueError(f"it is version {record.version}'s")
    return record


@contextlib.contextmanager
def refusing(folder: pathlib.Path) -> Iterator[None]:
    """Turns errors about a version on the disk into Refused, which says what to do.

    >>> with refusing(pathlib.Path("v000003")):
    ...     raise ValueError("it is damaged")
    Traceback (most recent call last):
    jaxlowprec.weight_sync.errors.Refused: v000003: it is damaged; publish another complete version
    """
    try:
        yield
    except (CheckpointError, ValueError, OSError) as error:
        raise Refused(f"{folder}: {error}; publish another complete version") from error


def write_record(folder: pathlib.Path, record: Record) -> None:
    """Writes `manifest.json`, the last file of a version.

    >>> import tempfile
    >>> record = Record(1, None, 0, Manifest(()), (), {}, {})
    >>> with tempfile.TemporaryDirectory() as path:
    ...     folder = pathlib.Path(path, folder_name(1))
    ...     folder.mkdir()
    ...     write_record(folder, record)
    ...     read_record(folder) == record
    True
    """
    write_json(folder / RECORD_FILE, record.to_json())
