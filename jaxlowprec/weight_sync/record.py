"""What a published version says of itself: `manifest.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files import read_json_object, write_json
from jaxlowprec.weight_sync.bucket import Header, checksum
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import folder_name
from jaxlowprec.weight_sync.manifest import Manifest

RECORD_FILE = "manifest.json"

_FORMAT = 1
_FIELDS = {"format", "version", "base_version", "files", "manifest", "buckets", "before", "after", "checksum"}


@dataclasses.dataclass(frozen=True)
class Record:
    """What `manifest.json` says of a version.

    Attributes:
        version: its number.
        base_version: of a delta: the version that it changes; None: it is complete.
        files: how many files of changes a delta has.
        manifest: what the version consists of, changed or not.
        buckets: the headers under which it was sent, with the checksums of its whole bytes.
        before, after: checksum of each tensor's bytes in the base version (of a delta) and in this one.

    >>> record = Record(1, None, 0, Manifest(()), (), {}, {})
    >>> Record.from_json(record.to_json()) == record
    True
    """

    version: int
    base_version: int | None
    files: int
    manifest: Manifest
    buckets: tuple[Header, ...]
    before: dict[str, str]
    after: dict[str, str]

    def to_json(self) -> dict[str, object]:
        """For `from_json`, with a checksum of itself."""
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
        """The inverse. Raises ValueError for anything else than what `to_json` gives."""
        if set(content) != _FIELDS or content["format"] != _FORMAT:
            raise ValueError(
                f"it has {sorted(content)}, format {content.get('format')!r}; this version reads {_FORMAT}"
            )
        if _checksum({name: value for name, value in content.items() if name != "checksum"}) != content["checksum"]:
            raise ValueError("it is damaged: its checksum is wrong")
        fields = {name: content[name] for name in ("version", "base_version", "files", "before", "after")}
        if not all(isinstance(fields[name], dict) for name in ("before", "after")):
            raise ValueError("before and after must map tensors to checksums")
        if not all(type(fields[name]) is int for name in ("version", "files")):
            raise ValueError("version and files must be whole numbers")
        manifest = Manifest.from_json(json.dumps(content["manifest"]).encode())
        headers = tuple(Header.from_json(json.dumps(header).encode()) for header in content["buckets"])  # type: ignore[attr-defined]
        return cls(**fields, manifest=manifest, buckets=headers)  # type: ignore[arg-type]


def _checksum(content: dict[str, object]) -> str:
    return checksum(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())


def read_record(folder: pathlib.Path) -> Record:
    """What a version says of itself.

    Raises:
        Refused: its manifest is missing, damaged or another version's.

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
    """What is wrong with a version on the disk becomes Refused, which says what to do.

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
