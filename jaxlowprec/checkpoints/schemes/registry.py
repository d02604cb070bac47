"""Schemes by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlowprec.checkpoints.schemes.awq import AWQ
from jaxlowprec.checkpoints.schemes.base import Scheme
from jaxlowprec.checkpoints.schemes.eight_bit.rows import Float8Rows, Int8Rows
from jaxlowprec.checkpoints.schemes.eight_bit.tensor import AutoFloat8, Float8PerTensor, ModelOptFloat8
from jaxlowprec.checkpoints.schemes.eight_bit.tiles import DeepSeekFloat8, Float8Tiles
from jaxlowprec.checkpoints.schemes.gpt_oss import GPTOSSMXFP4
from jaxlowprec.checkpoints.schemes.gptq import GPTQ
from jaxlowprec.checkpoints.schemes.int4 import PackedInt4, PackedInt4Asymmetric
from jaxlowprec.checkpoints.schemes.mx import MilesMXFP8, PackedMXFP4, QuantizedMXFP8
from jaxlowprec.checkpoints.schemes.nvfp4 import ModelOptNVFP4, PackedNVFP4, PackedNVFP4W4A4

_CLASSES: tuple[type[Scheme], ...] = (
    PackedInt4,
    PackedInt4Asymmetric,
    PackedNVFP4,
    PackedNVFP4W4A4,
    PackedMXFP4,
    QuantizedMXFP8,
    Float8Tiles,
    Float8Rows,
    Float8PerTensor,
    Int8Rows,
    DeepSeekFloat8,
    AutoFloat8,
    ModelOptNVFP4,
    ModelOptFloat8,
    MilesMXFP8,
    GPTOSSMXFP4,
    GPTQ,
    AWQ,
)
_SCHEMES = {scheme.name: scheme for scheme in _CLASSES}

NAMES = tuple(_SCHEMES)
"""The names of all schemes."""


def by_name(name: str, *, group_size: int | None = None, **options: Any) -> Scheme:
    """The scheme of a name.

    Arguments:
        name: one of `NAMES`.
        group_size: elements along K that share a scale, for the INT4 schemes, which leave it open; -1: a whole row.
            None: the scheme's default.
        options: other fields of the scheme's class.

    Raises:
        ValueError: an unknown name or option, or a group size that the format does not have.
    """
    if name not in _SCHEMES:
        raise ValueError(f"schemes.by_name: no scheme {name!r}; there are {', '.join(NAMES)}")
    scheme = _SCHEMES[name]
    fields = [field.name for field in dataclasses.fields(scheme)]  # type: ignore[arg-type]
    if group_size is not None and "group_size" in fields:
        options["group_size"] = group_size
    if unknown := sorted(set(options) - set(fields)):
        known = ", ".join(fields) or "none"
        raise ValueError(f"schemes.by_name: {name} has no option {', '.join(unknown)}; its options: {known}")
    made = scheme(**options)
    if getattr(made, "group_size", None) == -1 or group_size is None:
        return made
    if not made.has_format or made.format.scaling == "tensor":
        raise ValueError(f"schemes.by_name: group_size={group_size}; {name} has no groups: leave it out")
    if group_size != made.format.length:
        raise ValueError(f"schemes.by_name: group_size={group_size}; {name} has groups of {made.format.length}")
    return made
