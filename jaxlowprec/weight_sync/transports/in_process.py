"""A trainer and its receiver in one process."""

from __future__ import annotations

from jaxlowprec.weight_sync.bucket import Bucket
from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.transports.transport import Closing


class InProcess(Closing):
    """Calls a receiver in the same process directly. Arrays go from device to device; the receiver makes copies.

    >>> InProcess(Receiver()).version(timeout=1)
    0
    """

    takes_arrays = True

    def __init__(self, receiver: Receiver):
        self.receiver = receiver

    def version(self, timeout: float) -> int:
        """See `Transport`."""
        return self.receiver.version

    def pause(self, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.pause(timeout)

    def begin(self, version: int, manifest: Manifest, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.begin(version, manifest)

    def send(self, bucket: Bucket, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.receive(bucket)

    def commit(self, version: int, manifest_hash: str, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.commit(version, manifest_hash)

    def abort(self, reason: str, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.abort(reason)

    def resume(self, timeout: float) -> None:
        """See `Transport`."""
        self.receiver.resume()

    def close(self) -> None:
        """See `Transport`."""
