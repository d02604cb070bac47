"""Lists the tensors of a GGUF file."""

from __future__ import annotations

import pathlib

from jaxlowprec.checkpoints.conversion.inspect import InspectedModule, Inspection
from jaxlowprec.checkpoints.errors import brief, escaped
from jaxlowprec.checkpoints.gguf.gguf_file import GGUFFile


def inspect_gguf(path: str | pathlib.Path) -> Inspection:
    """The tensors of a GGUF file with types, shapes and bytes, in the file's order.

    Raises:
        CheckpointError: see `GGUFFile`.
    """
    with GGUFFile(path) as file:
        modules = [InspectedModule(name, spec.type.name, spec.shape, spec.nbytes) for name, spec in file.specs.items()]
        architecture = file.metadata.get("general.architecture")
        named = escaped(brief(architecture).strip("'\"")) if isinstance(architecture, str) else "unknown architecture"
        return Inspection(str(path), f"GGUF v{file.header.version} {named}", tuple(modules))
