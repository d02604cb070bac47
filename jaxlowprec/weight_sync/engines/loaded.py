"""What an engine has loaded. Its model has the same shapes as long as it runs, and it may not check those it is given.

vLLM 0.32 cuts a quantised kernel that is larger than the model's without an error, and after one that is smaller it
loads nothing any more, the version before included.
"""

from __future__ import annotations

from jaxlowprec.checkpoints.errors import brief
from jaxlowprec.weight_sync.errors import Refused
from jaxlowprec.weight_sync.manifest import Manifest


class Loaded:
    """The shapes of the tensors that an engine has loaded over one transport."""

    def __init__(self) -> None:
        self._version, self._shapes = 0, dict[str, tuple[int, ...]]()
        self._begun: dict[str, tuple[int, ...]] = {}

    def begin(self, version: int, manifest: Manifest) -> None:
        """A new version. Raises Refused if a tensor has another shape than in the one that was loaded last."""
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
