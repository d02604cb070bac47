"""A complete version of the weights, as an engine reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlowprec.weight_sync.manifest import Manifest
from jaxlowprec.weight_sync.receiving.forms import Module, encoded


class Weights(Mapping[str, Any]):
    """The arrays of one version, by their names. It never changes: whoever holds it keeps this version, whole.

    Attributes:
        version: 0 before anything was received.
        manifest: the manifest of the version as it was sent.
        form: the form that weights were decoded to, see `forms`.

    >>> weights = Weights({"a": 1}, 7, Manifest(()))
    >>> weights["a"], weights.version, len(weights)
    (1, 7, 1)
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        version: int,
        manifest: Manifest,
        form: str = "published",
        modules: Mapping[str, Module] | None = None,
    ):
        self._arrays = dict(arrays)
        self.version = version
        self.manifest = manifest
        self.form = form
        self._modules = modules or {}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def dump(self) -> dict[str, np.ndarray]:
        """The tensors as they were sent, in their order, restored from the form.

        Raises:
            ValueError: no sent tensors decode to the live ones: somebody changed them.
        """
        sent = encoded(self._arrays, self._modules, self.form)
        return {entry.name: sent[entry.name] for entry in self.manifest.entries}

    def __repr__(self) -> str:
        return f"Weights(version={self.version}, {len(self)} arrays, form={self.form!r})"


NOTHING = Weights({}, 0, Manifest(()))
"""Served before the first version arrives."""
