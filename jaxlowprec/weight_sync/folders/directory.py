"""Versions as folders of safetensors files on a disk that trainer and engines share.

The transport writes. `pull` (see `pulling.py`) reads on the engine's side, whenever the engine calls it. Only the file
system is between them: a version appears as a whole, by one rename, after all of it is on the disk.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from jaxlowprec.checkpoints.files.folder import INDEX_FILE
from jaxlowprec.checkpoints.files.strict_json import repeated
from jaxlowprec.locks import locked
from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.folders import layout as folders
from jaxlowprec.weight_sync.folders.record import RECORD_FILE
from jaxlowprec.weight_sync.folders.written_version import CompleteWriter, WrittenVersion
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.transports.sockets import check_timeout
from jaxlowprec.weight_sync.transports.transport import Closing
from jaxlowprec.weight_sync.versions import newer

SHARD_BYTES = 5 << 30
"""The most bytes of a safetensors file, unless a single tensor has more."""


class DirectoryTransport(Closing):
    """Publishes each version as a folder `v000007` with everything that an engine loads. See `Transport`.

    The folder is written under a temporary name and gets its final name at `commit`, when all of it is on the disk.
    Engines are not paused: they take a version when they want, by `pull` or on their own. One trainer writes at a time.
    `timeout` limits waiting for another trainer; it does not limit writing and waiting for the disk.

    Arguments:
        path: the folder of versions; it is made if it is missing.
        keep: how many complete versions stay; versions that somebody reads stay, too.
        files: files that are copied into every version, such as config.json and the tokenizer's files.
        shard_bytes: the size of a safetensors file.

    Raises:
        Refused: another trainer is writing; the version is not newer than those in the folder; or buckets are out of
            order or damaged.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> from jaxlowprec.weight_sync.folders.pulling import pull
    >>> from jaxlowprec.weight_sync.receiving.receiver import Receiver
    >>> bucket = pack(1, 0, True, {"a": np.ones(2, np.float32)})
    >>> manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    >>> with tempfile.TemporaryDirectory() as path:
    ...     transport = DirectoryTransport(path)
    ...     transport.pause(timeout=5)
    ...     transport.begin(1, manifest, timeout=5)
    ...     transport.send(bucket, timeout=5)
    ...     transport.commit(1, manifest.hash, timeout=5)
    ...     transport.resume(timeout=5)
    ...     receiver = Receiver()
    ...     pull(path, receiver)
    1
    >>> receiver.weights["a"]
    array([1., 1.], dtype=float32)
    """

    takes_arrays = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 2,
        files: Sequence[str | os.PathLike[str]] = (),
        shard_bytes: int = SHARD_BYTES,
    ):
        if type(keep) is not int or keep < 1:
            raise ValueError(f"{type(self).__name__}: keep is {keep!r}; needs at least 1")
        self.path = pathlib.Path(path)
        self._keep, self._files, self._shard_bytes = keep, [pathlib.Path(file) for file in files], shard_bytes
        for file in self._files:
            if not file.is_file() or file.name == RECORD_FILE or file.name.endswith((".safetensors", INDEX_FILE)):
                raise ValueError(
                    f"{type(self).__name__}: files has {file}; needs files beside the weights, as config.json"
                )
        if name := repeated(file.name for file in self._files):
            twice = " and ".join(str(file) for file in self._files if file.name == name)
            raise ValueError(f"{type(self).__name__}: files has {twice}; needs files with names of their own")
        self._lock: int | None = None
        self._open: WrittenVersion | None = None
        self._newest = 0  # the newest version that this transport published

    def version(self, timeout: float) -> int:
        """The newest published version; 0: none yet. It keeps counting even if somebody empties the folder."""
        return max((self._newest, *folders.versions(self.path)))

    def pause(self, timeout: float) -> None:
        """Takes the folder for this trainer, and removes what a killed trainer left."""
        if self._lock is not None:
            raise Refused(f"pause: {self.path}: a session is open already; resume it first")
        check_timeout("pause", timeout)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise Refused(f"pause: {self.path}: Not a directory; needs the folder of versions") from error
        self._lock = _lock(self.path / folders.LOCK, timeout)
        folders.remove_unfinished(self.path)

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version."""
        if self._lock is None:
            raise Refused("begin: no session is open; pause first")
        if self._open is not None:
            raise Refused(f"begin: version {self._open.staging.version} is being written; abort it first")
        self._open = self._next(newer(version, self.version(timeout), "published"), manifest)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Writes the next bucket's tensors."""
        self._opened("send").take(bucket)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """Flushes the version to the disk, gives it its name, and removes old versions."""
        opened = self._opened("commit")
        staging = opened.staging
        if (version, manifest_hash) != (staging.version, staging.manifest.hash):
            raise Refused(
                f"commit: version {version!r}, manifest {manifest_hash!r}; {staging.version}, "
                f"{staging.manifest.hash!r} is being written"
            )
        opened.finish([] if folders.is_delta(opened.folder) else self._files)
        self._open, self._newest = None, staging.version
        self._published(opened)
        folders.prune(self.path, self._keep)

    def abort(self, reason: str, timeout: float) -> None:
        """Removes what was written since `begin`."""
        self._forget()

    def resume(self, timeout: float) -> None:
        """Releases the folder to other trainers."""
        self._forget()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def close(self) -> None:
        """Ends an open session."""
        self.resume(timeout=0)

    def _opened(self, verb: str) -> WrittenVersion:
        if self._open is None:
            raise Refused(f"{verb}: no version is being written; begin one first")
        return self._open

    def _forget(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.abandon()

    def _next(self, version: int, manifest: Manifest) -> WrittenVersion:
        """The writer of the next version."""
        folder = self.path / folders.folder_name(version)
        return WrittenVersion(folder, version, manifest, lambda to: CompleteWriter(to, manifest, self._shard_bytes))

    def _published(self, written: WrittenVersion) -> None:
        """Called after a version got its name."""


def _lock(path: pathlib.Path, timeout: float) -> int:
    """An open descriptor that holds the trainers' lock. Raises Refused if another trainer has it, or locking fails."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise Refused(f"pause: {path}: {error.strerror}; needs a file that trainers can lock, and no link") from error
    try:
        if not locked(descriptor, timeout):
            raise Refused(
                f"pause: {path.parent}: another trainer has been writing for {timeout:g} s; let it end, or stop it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
