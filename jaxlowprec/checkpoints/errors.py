"""The error of everything that reads or writes checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint, or what was asked of it, is wrong: the message says where, what, and what to do."""
