"""Errors of a sync. Mistakes in a call are ValueErrors and TypeErrors, as everywhere in the library."""

from __future__ import annotations


class SyncError(Exception):
    """A sync that did not take place. The receiver still serves its old version, whole.

    >>> issubclass(Refused, SyncError) and issubclass(PeerTimeout, PeerLost)
    True
    """


class Refused(SyncError):
    """The receiver refused the call, and is in the same state as before it.

    Attributes:
        reason: why it refused.

    >>> str(Refused("version 3 is stale; 4 is served"))
    'version 3 is stale; 4 is served'
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Aborted(SyncError):
    """`abort` ended the session, in another thread or by the receiver.

    >>> str(Aborted("the engine shuts down"))
    'the engine shuts down'
    """


class PeerLost(SyncError):
    """The other side went away or speaks another protocol: whether the last call took effect is unknown.

    >>> isinstance(PeerLost("connection reset"), SyncError)
    True
    """


class PeerTimeout(PeerLost):
    """The other side did not answer in time.

    >>> isinstance(PeerTimeout("no answer to commit within 30 s"), PeerLost)
    True
    """
