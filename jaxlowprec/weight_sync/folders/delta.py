"""Versions as changes since the previous version: between two steps of training most bytes stay the same.

Changes are never applied to weights that are served: `pull` makes the new version beside the old one.
"""

from __future__ import annotations

import logging
from typing import Any

from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.open_files import memory
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.delta_files import Base, Changes, ChangesWriter, count_files
from jaxlowprec.weight_sync.folders.directory import DirectoryTransport
from jaxlowprec.weight_sync.folders.written_version import WrittenVersion
from jaxlowprec.weight_sync.manifest import Manifest

_LOG = logging.getLogger(__name__)


class DeltaTransport(DirectoryTransport):
    """Publishes what changed since the previous version; at intervals, and after a restart, a complete version.

    The trainer's process keeps the bytes of the previous version in memory, as many as one version has. The names of
    versions show which are complete. Everything else is as in `DirectoryTransport`.

    Arguments:
        path, keep, files, shard_bytes: see `DirectoryTransport`. `keep` counts complete versions; their deltas stay.
        full_every: one version in this many is complete.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> with tempfile.TemporaryDirectory() as path:
    ...     transport = DeltaTransport(path, full_every=3)
    ...     for version in (1, 2, 3, 4):
    ...         bucket = pack(version, 0, True, {"a": np.arange(99) + version, "b": np.ones(99)})
    ...         manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    ...         transport.pause(timeout=5)
    ...         transport.begin(version, manifest, timeout=5)
    ...         transport.send(bucket, timeout=5)
    ...         transport.commit(version, manifest.hash, timeout=5)
    ...         transport.resume(timeout=5)
    ...     [folder.name for folder in folders.versions(transport.path).values()]
    ['v000001', 'v000002-delta', 'v000003-delta', 'v000004']
    """

    def __init__(self, path: Any, *, full_every: int = 8, **options: Any):
        super().__init__(path, **options)
        if type(full_every) is not int or full_every < 1:
            raise ValueError(f"DeltaTransport: full_every is {full_every!r}; needs at least 1")
        self._full_every = full_every
        self._base: Base | None = None

    def _next(self, version: int, manifest: Manifest) -> WrittenVersion:
        base = self._base
        fits = (
            base is not None
            and base.version == max(folders.versions(self.path), default=0)
            and base.manifest.hash == manifest.hash
        )
        if base is None or not fits or base.deltas + 1 >= self._full_every:
            return super()._next(version, manifest)
        folder = self.path / folders.folder_name(version, delta=True)
        return WrittenVersion(folder, version, manifest, lambda to: ChangesWriter(to, base))

    def _published(self, written: WrittenVersion) -> None:
        base, self._base = self._base, None
        try:
            self._base = _advanced(base, written)
        except (OSError, ValueError) as error:  # the version is published; only the base for the next one is lost
            _LOG.warning("weight sync: the next version will be complete, not a delta: %s", error)


def _advanced(base: Base | None, written: WrittenVersion) -> Base:
    """Brings a base to the version that was published, from its files."""
    staging = written.staging
    if base is not None and folders.is_delta(written.folder):
        with Changes(written.folder, count_files(written.folder)) as changes:
            for name, tensor in base.tensors.items():
                if written.checksums[name] != base.checksums[name]:
                    changes.apply(name, tensor)
        base.deltas += 1
    else:
        with CheckpointFolder(written.folder) as opened:
            if base is None or base.manifest.hash != staging.manifest.hash:
                base = Base(0, staging.manifest, {n: memory(e.nbytes) for n, e in staging.manifest.by_name.items()}, {})
            for name, tensor in base.tensors.items():
                opened.file_of(name).read_into(name, tensor)
        base.deltas = 0
    base.version, base.checksums = staging.version, written.checksums
    return base
