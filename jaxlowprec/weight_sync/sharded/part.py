"""A process's part of a version, as both sides agree on it: its shards, and a note on the whole version.

A shard is a tensor named after the array and the box that it fills, such as "up.kernel[0:128,256:512]". The note is a
tensor, too; it holds the manifest of the whole version and says which of how many processes sent the part.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.manifest import MAX_JSON_BYTES, Manifest, parse
from jaxlowprec.weight_sync.sending.source import WeightSource

NOTE = "part.json"
"""The name of the tensor that holds the note. No shard has it: theirs end with a bracket."""

Box = tuple[tuple[int, int], ...]
"""The begin and end of a shard along each axis of its array."""

_FIELDS = {"process", "processes", "manifest"}
_SHARD = re.compile(r"(?s)(.+)\[((?:[0-9]{1,15}:[0-9]{1,15}(?:,[0-9]{1,15}:[0-9]{1,15})*)?)\]")


@dataclasses.dataclass(frozen=True)
class Note:
    """The header of a part: the version that it belongs to.

    Attributes:
        process, processes: which of how many processes sent it.
        manifest: the manifest of the whole version, with whole arrays.

    >>> Note.read(Note(1, 2, Manifest(())).written())
    Note(process=1, processes=2, manifest=Manifest(entries=(), scheme=None))
    """

    process: int
    processes: int
    manifest: Manifest

    def written(self) -> np.ndarray:
        """The note as a tensor, uint8 [bytes]."""
        manifest = self.manifest.to_json().decode()
        content = {"process": self.process, "processes": self.processes, "manifest": manifest}
        return np.frombuffer(json.dumps(content).encode(), np.uint8)

    @classmethod
    def read(cls, written: Any) -> Note:
        """The inverse of `written`. Raises ValueError if the tensor holds no note."""
        content = parse("Note.read", np.asarray(written, np.uint8).tobytes(), 2 * MAX_JSON_BYTES, _FIELDS)
        if type(content["process"]) is not int or type(content["processes"]) is not int:
            raise ValueError("Note.read: process and processes must be whole numbers")
        if not isinstance(content["manifest"], str):
            raise ValueError("Note.read: manifest must be a text")
        return cls(content["process"], content["processes"], Manifest.from_json(content["manifest"].encode()))


def shard_name(name: str, index: Sequence[slice], shape: Sequence[int]) -> str:
    """The name of a shard.

    Arguments:
        name: its array's.
        index: where it lies in the array, as a `jax.Shard` says it.
        shape: the array's.

    >>> shard_name("w", (slice(2, 4), slice(None)), (4, 8)), shard_name("step", (), ())
    ('w[2:4,0:8]', 'step[]')
    """
    box = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    return f"{name}[{','.join(f'{begin}:{end}' for begin, end in box)}]"


def read_shard_name(name: str) -> tuple[str, Box]:
    """The inverse of `shard_name`. Raises ValueError if it is no shard's name.

    >>> read_shard_name("w[2:4,0:8]")
    ('w', ((2, 4), (0, 8)))
    """
    found = _SHARD.fullmatch(name)
    if found is None:
        raise ValueError(f"{brief(name)} is no name of a shard, such as 'w[0:4,0:8]'")
    spans = [span.split(":") for span in found[2].split(",") if span]
    return found[1], tuple((int(begin), int(end)) for begin, end in spans)


def part_of(manifest: Manifest, shards: Mapping[str, Any], process: int, processes: int) -> WeightSource:
    """A part, ready to be sent.

    Arguments:
        manifest: that of the whole version.
        shards: the process's shards, by their names (`shard_name`).
        process, processes: which of how many processes sends them.

    >>> part_of(Manifest(()), {"w[0:1]": np.ones(1, np.float32)}, 0, 2).manifest.entries[1].name
    'w[0:1]'
    """
    return WeightSource({**shards, NOTE: Note(process, processes, manifest).written()})
