"""The receiving side. It holds two versions, so that a complete version is served whatever happens.

    serving --pause--> paused --begin--> receiving --commit--> paused --resume--> serving
                          ^------------abort-----------'

`resume` is allowed in every state and leads to "serving"; a version that was being received is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader
from jaxlowprec.weight_sync.errors import PeerTimeout, Refused
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving import forms
from jaxlowprec.weight_sync.receiving.staging import Staging
from jaxlowprec.weight_sync.receiving.weights import NOTHING, Memory, Weights, own_copy, placed
from jaxlowprec.weight_sync.transports.sockets import check_timeout
from jaxlowprec.weight_sync.versions import newer

_LOG = logging.getLogger(__name__)


class Receiver:
    """Receives versions of the weights and serves the newest complete one.

    One thread, the trainer's or a transport's, calls the verbs; engine threads read `weights` at any time without
    waiting. Arrays that are received as bytes are read-only numpy arrays.

    Arguments:
        form: the form that weights are decoded to before a version is served, one of `forms.NAMES`.
        dtype: the dtype of weights under form="plain".
        shardings: where arrays are placed: maps names to a `jax.sharding.Sharding` or device, or is a function of the
            name; None for an array: where it was; arrays that come as bytes stay numpy's.
        on_pause: stops the engine; it is called with the seconds that it may take, and raises TimeoutError if they
            pass.
        on_resume: lets the engine go on; called after every `on_pause`, even if that failed.
        max_bytes: the most bytes of a version; a larger manifest is refused. None: no limit.
        keep_memory: reuse the memory of the previous version, once nobody holds it, for the next one, instead of asking
            the system for memory at every sync.
        timeout: seconds that a call waits for another thread's call.

    Raises:
        ValueError: the form is unknown, or the timeout never ends.
        Refused: by every verb, if the state or the arguments forbid it; nothing has changed then.

    >>> from jaxlowprec.weight_sync.bucket import pack
    >>> bucket = pack(1, 0, True, {"a": np.ones(2, np.float32)})
    >>> manifest = Manifest(tuple(placed.entry for placed in bucket.entries))
    >>> receiver = Receiver()
    >>> receiver.pause(timeout=10)
    >>> receiver.begin(1, manifest)
    >>> receiver.receive(bucket)
    >>> receiver.version  # until the commit the old one is served
    0
    >>> receiver.commit(1, manifest.hash)
    >>> receiver.resume()
    >>> receiver.version, receiver.weights["a"]
    (1, array([1., 1.], dtype=float32))
    """

    def __init__(
        self,
        *,
        form: str = "published",
        dtype: Any = "bfloat16",
        shardings: Mapping[str, Any] | Callable[[str], Any] | None = None,
        on_pause: Callable[[float], None] | None = None,
        on_resume: Callable[[], None] | None = None,
        max_bytes: int | None = None,
        keep_memory: bool = True,
        timeout: float = 600.0,
    ):
        if form not in forms.NAMES:
            raise ValueError(f"Receiver: form={form!r}; needs one of {', '.join(forms.NAMES)}")
        self._form, self._dtype = form, dtype
        self._sharding_of = shardings.get if isinstance(shardings, Mapping) else shardings or (lambda _: None)
        self._on_pause, self._on_resume = on_pause, on_resume
        self._max_bytes, self._timeout = max_bytes, check_timeout("Receiver", timeout)
        self._memory = Memory(keep_memory)
        self._lock = threading.Lock()
        self._paused = False
        self._staging: Staging | None = None
        self._live = NOTHING

    @property
    def weights(self) -> Weights:
        """The newest complete version. It is a snapshot, which does not change when another version comes."""
        return self._live

    @property
    def version(self) -> int:
        """The version of `weights`; 0 before the first commit."""
        return self._live.version

    def dump(self) -> dict[str, np.ndarray]:
        """The tensors that were sent, restored from the live weights in any form."""
        return self._live.dump()

    @property
    def state(self) -> str:
        """ "serving", "paused" or "receiving"."""
        return "receiving" if self._staging is not None else "paused" if self._paused else "serving"

    def pause(self, timeout: float) -> None:
        """Stops the engine and opens a session. Raises PeerTimeout if the engine takes longer than `timeout` s."""
        with self._alone("pause"):
            if self._paused:
                raise Refused(f"pause: the receiver is {self.state} already, in a session that was not ended")
            self._paused = True
            try:
                if self._on_pause is not None:
                    self._on_pause(timeout)
            except BaseException as error:
                self._go_on()
                if isinstance(error, TimeoutError):
                    raise PeerTimeout(f"pause: the engine did not stop within {timeout} s") from error
                raise

    def begin(self, version: int, manifest: Manifest) -> None:
        """Starts a version that consists of these tensors."""
        with self._alone("begin"):
            if self._staging is not None:
                raise Refused(f"begin: version {self._staging.version} is being received; abort it first")
            if not self._paused:
                raise Refused("begin: the receiver is serving; pause it first")
            version = newer(version, self.version)
            if self._max_bytes is not None and manifest.nbytes > self._max_bytes:
                raise Refused(f"begin: the version has {manifest.nbytes} bytes; at most {self._max_bytes} are taken")
            try:
                forms.check(manifest.scheme, self._form)
            except ValueError as error:
                raise Refused(f"begin: version {version}, in form {self._form!r}: {error}") from None
            self._staging = Staging(version, manifest, self._memory)

    def receive(self, bucket: Bucket) -> None:
        """Takes the next bucket, of bytes or arrays, by copying: the caller may overwrite, donate or delete its own."""
        if bucket.holds_arrays:
            with self._alone("receive"):
                self._receiving("receive").take_arrays(bucket, self._own)
            return
        if bucket.payload.nbytes != bucket.header.nbytes:
            raise Refused(f"receive: the payload has {bucket.payload.nbytes} bytes, not {bucket.header.nbytes}")
        np.copyto(np.frombuffer(self.destination(bucket.header), np.uint8), bucket.payload)
        self.received(bucket.header)

    def destination(self, header: BucketHeader) -> memoryview:
        """The memory to which a transport writes the payload of the next bucket: writable bytes [header.nbytes].

        It becomes the weights' own memory. Call `received` after the last byte; until then nothing counts as received,
        and after a failed transfer `destination` may be called again. Never write to the memory after `received`.
        """
        with self._alone("receive"):
            return self._receiving("receive").destination(header)

    def received(self, header: BucketHeader, digest: str | None = None) -> None:
        """Says that the payload is in its place; verifies its checksum.

        Arguments:
            header: the header that `destination` was called with.
            digest: the payload's checksum, if it was computed while the bytes came; None: it is computed here.
        """
        with self._alone("receive"):
            self._receiving("receive").received(header, digest)

    def commit(self, version: int, manifest_hash: str) -> None:
        """From here on the new version is served. A commit that fails while it decodes drops what was received."""
        with self._alone("commit"):
            staging = self._receiving("commit")
            if version != staging.version:
                raise Refused(f"commit: version {brief(version)}; {staging.version} is being received")
            if manifest_hash != staging.manifest.hash:
                raise Refused(f"commit: manifest {brief(manifest_hash)}; {staging.manifest.hash!r} is being received")
            staging.complete()
            self._staging = None
            self._memory.trim()  # frees what this version did not use; the old version's memory comes back after this
            self._live = self._finished(staging)

    def abort(self, reason: str) -> None:
        """Drops what was received since `begin`; the old version stays. Does nothing in another state."""
        with self._alone("abort"):
            if self._staging is not None:
                _LOG.info("weight sync: version %d is given up: %s", self._staging.version, reason)
            self._staging = None

    def resume(self) -> None:
        """Lets the engine go on, with the version that is complete. Does nothing if it was not paused."""
        with self._alone("resume"):
            self._go_on()

    def _own(self, name: str, array: Any) -> Any:
        return own_copy(array, self._sharding_of(name), self._memory)

    def _go_on(self) -> None:
        self._staging = None
        if self._paused:
            self._paused = False
            if self._on_resume is not None:
                self._on_resume()

    def _receiving(self, verb: str) -> Staging:
        if self._staging is None:
            raise Refused(f"{verb}: no version is being received (the receiver is {self.state}); begin one first")
        return self._staging

    def _finished(self, staging: Staging) -> Weights:
        """The received version in the receiver's form. Raises Refused if it cannot be decoded."""
        live: dict[str, Any] = {}
        modules: dict[str, forms.Module] = {}
        scheme = staging.manifest.scheme
        try:
            staging.buckets.reverse()
            while staging.buckets:  # frees the memory of one bucket before the next is decoded
                arrays, found = forms.decoded(staging.buckets.pop(), scheme, self._form, self._dtype)
                live |= {name: self._placed(name, arrays.pop(name)) for name in list(arrays)}
                modules |= found
            jax.block_until_ready([array for array in live.values() if isinstance(array, jax.Array)])
        except Exception as error:
            raise Refused(f"commit: version {staging.version} cannot be decoded: {error}") from error
        return Weights(live, staging.version, staging.manifest, self._form, modules)

    def _placed(self, name: str, array: Any) -> Any:
        sharding = self._sharding_of(name)
        if sharding is None or (isinstance(array, jax.Array) and array.sharding == sharding):
            return array
        return placed(array, sharding)

    @contextlib.contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout):
            raise PeerTimeout(f"{verb}: another call has been running for {self._timeout} s")
        try:
            yield
        finally:
            self._lock.release()
