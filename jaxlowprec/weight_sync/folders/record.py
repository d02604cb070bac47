"""The record of a published version: `manifest.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.written_whole import read_json_object, write_json
from jaxlowprec.weight_sync.bucket import MAX_VERSION, BucketHeader, checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders.layout import folder_name
from jaxlowprec.weight_sync.manifest import Manifest

RECORD_FILE = "manifest.json"

_FORMAT = 1
_FIELDS = {"format", "version", "base_version", "files", "manifest", "buckets", "before", "after", "checksum"}


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
