"""The modules of a quantised checkpoint: which tensors belong together, by their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes.base import Scheme

_PLAIN = ("weight", "bias")


def quantised_modules(source: CheckpointFolder, scheme: Scheme) -> dict[str, dict[str, str]]:
    """The modules held in a scheme's format: name to the names of their tensors, by the last part of these.

    Raises:
        CheckpointError: a module has some of the format's tensors, and lacks others.
    """
    known = {*scheme.required, *scheme.optional}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in source.shard_of:
        module, _, last = name.rpartition(".")
        if last in known:
            found[module][last] = name
    modules = {}
    for module, tensors in found.items():
        if not set(tensors) - set(_PLAIN):
            continue  # in high precision
        if missing := [last for last in scheme.required if last not in tensors]:
            raise CheckpointError(
                f"{source.path}: module {module!r} has {', '.join(sorted(tensors))}; {scheme.name} also needs "
                f"{', '.join(missing)}"
            )
        modules[module] = {last: name for last, name in tensors.items() if last not in _PLAIN or last in scheme.required}
    return modules


def read_module(source: CheckpointFolder, tensors: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Views of a module's tensors, by the last part of their names."""
    return {last: source.read(name) for last, name in tensors.items()}
