"""Engines that load a version from a shared disk when they are told to, and the shapes that any engine has loaded.

An engine's model has the same shapes as long as it runs, and it may not check those it is given. vLLM 0.32 cuts a
quantised kernel that is larger than the model's without an error, and after one that is smaller it loads nothing any
more, the version before included.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.checkpoints.trees.kv_scales import cache_scales
from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.errors import Refused, SyncError
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.directory import SHARD_BYTES, DirectoryTransport
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.transports.transport import Closing
from jaxlowprec.weight_sync.versions import said_version


class LoadedShapes:
    """The shapes of the tensors that an engine has loaded over one transport."""

    def __init__(self) -> None:
        self._version, self._shapes = 0, dict[str, tuple[int, ...]]()
        self._begun: dict[str, tuple[int, ...]] = {}

    def begin(self, version: int, manifest: Manifest) -> None:
        """A new version.

        Raises:
            Refused: a tensor has another shape than in the one that was loaded last, or is a static scale of a cache.
        """
        for name in cache_scales({entry.name: entry.shape for entry in manifest.entries}):
            raise Refused(
                f"begin: {brief(name)} is a static scale of a cache; engines take it when they start, and keep the old "
                "one in silence afterwards: start the engine from a saved folder, or use scales of each token and "
                "head, which no tensor holds: KVCache()"
            )
        for entry in manifest.entries:
            shape = self._shapes.get(entry.name, entry.shape)
            if tuple(entry.shape) != tuple(shape):
                raise Refused(
                    f"begin: {brief(entry.name)} of version {version} has shape {list(entry.shape)}, and {list(shape)} "
                    f"in version {self._version}, which the engine loaded; needs the shapes of the engine's model. If "
                    "the engine was started with another model, make a new transport"
                )
        self._begun = {entry.name: tuple(entry.shape) for entry in manifest.entries}

    def commit(self, version: int) -> None:
        """The engine has loaded the version that began."""
        self._version = version
        self._shapes |= self._begun


class DiskEngine(Closing):
    """Writes versions to a folder (see `DirectoryTransport`) and tells an engine to load them. See `Transport`.

    The engine serves while the version is written, and is paused only while it loads, in `commit`. It overwrites the
    weights that it has: if loading fails, it is told to load the previous version, which is still on the disk. `resume`
    always reaches an engine that was told to pause, even if its answer to that was lost.

    Subclasses make the calls: `_pause`, `_load`, `_go_on`, `_served`.

    Arguments:
        url: the URL of the engine's server.
        path: the folder of versions: one path on the trainer's and the engine's machine, or see `engine_path`.
        engine_path: the path of that folder on the engine's machine.
        api_key: the key that the server asks for.
        keep, files, shard_bytes: see `DirectoryTransport`. config.json has to be in `files`: engines read it.

    >>> DiskEngine("http://localhost:30000", "/shared/weights", keep=1)
    Traceback (most recent call last):
    ValueError: DiskEngine: keep is 1; needs at least 2, so that the version before can be loaded again
    """

    takes_arrays = False
    without = ""  # what to do if the server lacks a call

    def __init__(
        self,
        url: str,
        path: str | os.PathLike[str],
        *,
        engine_path: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        keep: int = 2,
        files: Sequence[str | os.PathLike[str]] = (),
        shard_bytes: int = SHARD_BYTES,
    ):
        if type(keep) is not int or keep < 2:
            raise ValueError(
                f"{type(self).__name__}: keep is {keep!r}; needs at least 2, so that the version before can be loaded "
                "again"
            )
        self._engine = HttpEngine(url, api_key, self.without)
        self._folders = DirectoryTransport(path, keep=keep, files=files, shard_bytes=shard_bytes)
        self._engine_path = pathlib.Path(self._folders.path.absolute() if engine_path is None else engine_path)
        self._paused = False
        self._loaded = LoadedShapes()

    def version(self, timeout: float) -> int:
        """The newest version that is published or that the engine says it serves; text without a number counts as 0."""
        return max(self._folders.version(timeout), said_version(self._served(timeout)))

    def pause(self, timeout: float) -> None:
        """Takes the folder. The engine goes on until the version is written."""
        self._folders.pause(timeout)

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version. Raises Refused if shapes are not those of the version that was loaded last."""
        self._loaded.begin(version, manifest)
        self._folders.begin(version, manifest, timeout)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Writes the next bucket."""
        self._folders.send(bucket, timeout)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """Publishes the folder, pauses the engine and makes it load the version; each call may take `timeout` s.

        Raises:
            Refused, PeerLost: the engine did not load it. It was told to load the previous version; the error says if
                that failed, too. The new version stays published; the next one has to have a higher number.
        """
        before = self._folders.version(timeout)
        self._folders.commit(version, manifest_hash, timeout)
        self._paused = True
        self._pause(timeout)
        try:
            self._load(self._seen(version), version, timeout)
        except SyncError as error:
            self._go_back(before, error, timeout)
            raise
        self._loaded.commit(version)

    def abort(self, reason: str, timeout: float) -> None:
        """Removes what was written since `begin`."""
        self._folders.abort(reason, timeout)

    def resume(self, timeout: float) -> None:
        """Makes the engine go on, and releases the folder to other trainers."""
        try:
            if self._paused:
                self._go_on(timeout)
                self._paused = False
        finally:
            self._folders.resume(timeout)

    def reload(self, timeout: float) -> int:
        """Makes the engine load the newest published version, for example after its restart.

        Returns:
            The version; 0: none is published, and the engine is not called.
        """
        newest = max(folders.versions(self._folders.path), default=0)
        if newest:
            self.pause(timeout)
            try:
                self._paused = True
                self._pause(timeout)
                self._load(self._seen(newest), newest, timeout)
            finally:
                self.resume(timeout)
        return newest

    def close(self) -> None:
        """Releases the folder."""
        self._folders.close()

    def _go_back(self, before: int, error: SyncError, timeout: float) -> None:
        if before not in folders.versions(self._folders.path):
            error.add_note("no earlier version is on the disk: the engine may hold parts of both; restart it")
            return
        try:
            self._load(self._seen(before), before, timeout)
        except SyncError as again:
            error.add_note(
                f"and it did not load version {before} again: {again}; it may hold parts of both: restart it"
            )

    def _seen(self, version: int) -> str:
        """The path of a version's folder on the engine's machine."""
        return str(self._engine_path / folders.folder_name(version))

    def _pause(self, timeout: float) -> None:
        raise NotImplementedError

    def _load(self, folder: str, version: int, timeout: float) -> None:
        raise NotImplementedError

    def _go_on(self, timeout: float) -> None:
        raise NotImplementedError

    def _served(self, timeout: float) -> str:
        raise NotImplementedError
