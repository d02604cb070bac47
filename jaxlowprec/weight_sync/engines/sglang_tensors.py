"""SGLang's server, which is given versions as tensors: by shared memory, or with the bytes in the request."""

from __future__ import annotations

import base64
import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader
from jaxlowprec.weight_sync.engines import sglang
from jaxlowprec.weight_sync.engines.http import HttpEngine
from jaxlowprec.weight_sync.engines.torch_payload import SharedBytes, in_shared_memory, remove_leftovers, with_bytes
from jaxlowprec.weight_sync.errors import Refused, SyncError
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.staging import Staging
from jaxlowprec.weight_sync.receiving.weights import Memory
from jaxlowprec.weight_sync.transports.transport import Closing
from jaxlowprec.weight_sync.versions import newer, said_version

OLDEST = (0, 5, 21)
"""The oldest SGLang that opens and ends a weight update, in which it undoes and repeats its repacking."""

Way = Literal["shared", "copied"]

_MOST_RANKS = 1024  # of one engine: a payload's text is sent for each
_BROKEN = "SGLang's model may hold parts of two versions: send another version, or restart it"


class SGLangTensors(Closing):
    """Makes an SGLang server load versions from memory, without a disk. See `Transport`.

    The trainer collects a version in host memory while the engine serves. `commit` pauses the engine, opens a weight
    update, gives it bucket after bucket, and ends the update: SGLang restores weights that its kernels hold in another
    order before it, and repacks them afterwards. One trainer at a time may do so. Needs SGLang 0.5.21 or newer;
    verified against 0.5.23 on a CPU.

    SGLang has no second copy of its weights. If loading fails, its model holds parts of two versions and computes
    nothing useful until the next version.

    Arguments:
        url: "http://host:30000".
        mode: what happens to running requests, see `SGLang`.
        memory: "shared": the version is in /dev/shm, which the engine maps; the engine runs on this machine, for the
            same user, with the same /dev/shm. "copied": the version is in the trainer's memory and travels in requests,
            as text, once per tensor-parallel rank; for engines elsewhere.
        api_key: the key that the server asks for.

    >>> transport = SGLangTensors("http://localhost:30000", mode="retract")
    >>> SGLangTensors("http://localhost:30000", memory="disk")
    Traceback (most recent call last):
    ValueError: SGLangTensors: memory is 'disk'; needs "shared" or "copied"
    """

    takes_arrays = False

    def __init__(
        self,
        url: str,
        *,
        mode: sglang.Mode = "retract",
        memory: Way = "shared",
        api_key: str | None = None,
    ):
        sglang.check_mode("SGLangTensors", mode)
        if memory not in get_args(Way):
            raise ValueError(f'SGLangTensors: memory is {memory!r}; needs "shared" or "copied"')
        self._engine = HttpEngine(url, api_key, sglang.WITHOUT)
        self._mode, self._shared = mode, memory == "shared"
        self._ranks = 0  # of the session: as many payloads as the engine needs; 0: no session
        self._collected: _Collected | None = None
        self._paused = False

    def version(self, timeout: float) -> int:
        """The version that the engine says it serves; text without a number counts as 0."""
        return said_version(sglang.served(self._engine, timeout))

    def pause(self, timeout: float) -> None:
        """Opens a session. The engine goes on until it is given the version.

        Raises:
            Refused: the server is too old, or has data-parallel replicas, which it cannot update from tensors.
        """
        if self._ranks:
            raise Refused("pause: a session is open already; resume it first")
        ranks = _ranks(self._engine.call("GET", "/server_info", timeout=timeout, needs="version"))
        if self._shared:
            remove_leftovers()
        self._ranks = ranks

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """Starts a new version. Raises Refused for weights that the server cannot load again."""
        if not self._ranks:
            raise Refused("begin: no session is open; pause first")
        if self._collected is not None:
            raise Refused(f"begin: version {self._collected.version} is being collected; abort it first")
        if not manifest.nbytes:
            raise Refused(f"begin: version {version} has no bytes; SGLang takes versions of at least one tensor")
        sglang.check_int4(self._engine, manifest, timeout)
        self._collected = _Collected(newer(version, self.version(timeout)), manifest, self._shared)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """Copies the next bucket to the memory from which the engine will read it."""
        self._opened("send").take(bucket)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """Pauses the engine and makes it load the version; each call may take `timeout` s.

        Raises:
            Refused, PeerLost, PeerTimeout: the engine did not load it, and may hold parts of two versions.
        """
        collected = self._opened("commit")
        collected.check(version, manifest_hash)
        self._paused = True
        sglang.pause(self._engine, self._mode, timeout)
        self._begin_update(timeout)
        try:
            self._update(collected, timeout)
        except SyncError as error:
            with contextlib.suppress(SyncError):
                self._end_update(timeout)
            error.add_note(_BROKEN)
            raise
        try:
            self._end_update(timeout)
        except SyncError as error:
            error.add_note(_BROKEN)
            raise
        self._forget()

    def abort(self, reason: str, timeout: float) -> None:
        """Drops what was collected since `begin`."""
        self._forget()

    def resume(self, timeout: float) -> None:
        """Makes the engine go on, and ends the session."""
        self._forget()
        self._ranks = 0
        if self._paused:
            sglang.go_on(self._engine, timeout)
            self._paused = False

    def close(self) -> None:
        """Drops what was collected."""
        self._forget()

    def _opened(self, verb: str) -> _Collected:
        if self._collected is None:
            raise Refused(f"{verb}: no version is being collected; begin one first")
        return self._collected

    def _forget(self) -> None:
        collected, self._collected = self._collected, None
        if collected is not None:
            collected.close()

    def _begin_update(self, timeout: float) -> None:
        """Opens the engine's weight update; ends one that a trainer left open."""
        try:
            self._post("/begin_weight_update", {}, timeout)
        except Refused as error:
            if "already open" not in error.reason:
                raise
            self._end_update(timeout)
            self._post("/begin_weight_update", {}, timeout)

    def _end_update(self, timeout: float) -> None:
        self._post("/end_weight_update", {}, timeout)

    def _update(self, collected: _Collected, timeout: float) -> None:
        payloads = collected.payloads
        for number, payload in enumerate(payloads, 1):
            text = base64.b64encode(payload()).decode()
            last = number == len(payloads)
            body = {
                "serialized_named_tensors": [text] * self._ranks,
                "load_format": "flattened_bucket",
                "abort_all_requests": False,
                "flush_cache": last and self._mode != "in_place",
            }
            if last:
                body["weight_version"] = str(collected.version)
            self._post("/update_weights_from_tensor", body, timeout)

    def _post(self, path: str, body: dict[str, Any], timeout: float) -> None:
        self._engine.call("POST", path, body, timeout=timeout, needs="success")


class _Collected:
    """A version's buckets in host memory, and for each of them what makes its payload."""

    def __init__(self, version: int, manifest: Manifest, shared: bool):
        self.version = version
        self._memory: _Shared | _Copied = _Shared() if shared else _Copied()
        self._staging = Staging(version, manifest, self._memory)
        self.payloads: list[Callable[[], bytes]] = []

    def take(self, bucket: Bucket) -> None:
        """Takes the next bucket. Raises Refused if it is not the next, damaged, or has no room."""
        header = bucket.header
        np.copyto(np.frombuffer(self._staging.destination(header), np.uint8), bucket.payload)
        self._staging.received(header)
        if header.nbytes:  # otherwise there is nothing to load
            self.payloads.append(self._memory.payload(header))

    def check(self, version: int, manifest_hash: str) -> None:
        """Raises Refused unless this is the version, and it is complete."""
        mine = self.version, self._staging.manifest.hash
        if (version, manifest_hash) != mine:
            given = f"version {brief(version)}, manifest {brief(manifest_hash)}"
            raise Refused(f"commit: {given}; {mine[0]}, {mine[1]!r} is collected")
        self._staging.complete()

    def close(self) -> None:
        """Returns the memory."""
        self._memory.close()


class _Shared(Memory):
    """Lends shared memory."""

    def __init__(self) -> None:
        super().__init__(keep=False)
        self._files: list[SharedBytes] = []

    def take(self, nbytes: int) -> np.ndarray:
        if not nbytes:
            return super().take(nbytes)
        self._files.append(SharedBytes(nbytes))
        return self._files[-1].array

    def payload(self, header: BucketHeader) -> Callable[[], bytes]:
        """Makes the payload of the bucket that was written to the memory lent last."""
        return functools.partial(in_shared_memory, header, self._files[-1].name)

    def close(self) -> None:
        while self._files:
            self._files.pop().close()


class _Copied(Memory):
    """Lends the trainer's own memory."""

    def __init__(self) -> None:
        super().__init__(keep=False)
        self._last = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        self._last = super().take(nbytes)
        return self._last

    def payload(self, header: BucketHeader) -> Callable[[], bytes]:
        """Makes the payload of the bucket that was written to the memory lent last."""
        return functools.partial(with_bytes, header, self._last)

    def close(self) -> None:
        """Nothing: the memory is returned when nobody holds it."""


def _ranks(info: dict[str, Any]) -> int:
    """How many payloads an update needs, one per tensor-parallel rank. Raises Refused for a server that takes none."""
    said = str(info["version"])
    if sglang.numbers(said) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise Refused(
            f"pause: the server is SGLang {brief(said)}; updates from tensors need {needed} or newer: upgrade it, or "
            "use SGLang, which needs a shared disk"
        )
    ranks, replicas = info.get("tp_size"), info.get("dp_size")
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise Refused(
            f"pause: /server_info says tp_size {brief(ranks)}; needs the number of tensor-parallel ranks, at most "
            f"{_MOST_RANKS}"
        )
    if replicas != 1:
        raise Refused(
            f"pause: the server has dp_size {brief(replicas)}; SGLang updates one data-parallel replica from tensors: "
            "start a server for each, or use SGLang, which needs a shared disk"
        )
    return ranks
