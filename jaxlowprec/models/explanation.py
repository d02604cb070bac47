"""The table of what a recipe does to each layer of a model, which `explain` makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlowprec.layers.subscripts import KernelAxes
from jaxlowprec.recipes.fields import IN_FLOAT32, Sums
from jaxlowprec.recipes.roles import GEMMS, Roles

HIGH_PRECISION = Roles(None, None, None)


@dataclasses.dataclass(frozen=True)
class AppliedRecipe:
    """The recipe of one layer, as it applies.

    Attributes:
        path: the layer's path in the model.
        kernel: the shape of its kernel or embedding; for a loaded kernel that of its matrices [batch..., K, N].
        roles: the roles of its operands; None stays in high precision.
        note: why it stays in high precision, or what to watch for.
        axes: those of the kernel's matrices [batch..., K, N]; None if it does not consist of such matrices.
        unserved: why `quantize_params` cannot serve such a kernel, or "".
        sums: how devices add up partial sums of its quantised GEMMs; those of other GEMMs are XLA's.
        loaded: whether the kernel itself is quantised, in the format of the weight's role.
    """

    path: str
    kernel: tuple[int, ...]
    roles: Roles = HIGH_PRECISION
    note: str = ""
    axes: KernelAxes | None = None
    unserved: str = ""
    sums: Sums = IN_FLOAT32
    loaded: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The recipe of each layer of a model, as it applies; str() is a table.

    Attributes:
        layers: in the order of their calls (Linen) or of the model's attributes (NNX).
    """

    layers: tuple[AppliedRecipe, ...]

    @property
    def formats(self) -> dict[str, Any]:
        """Maps each path to the format of the kernel in the forward pass; None in high precision."""
        forms = {layer.path: layer.roles.forms("weight")[1] for layer in self.layers}
        return {path: None if role is None else role.format for path, role in forms.items()}

    @property
    def summary(self) -> str:
        """One line: how many matrices are quantised, and which are left, by the reason; of many only the first two."""
        left: dict[str, list[str]] = {}
        formats = self.formats
        for layer in self.layers:
            if formats[layer.path] is None:
                left.setdefault(layer.note or "in high precision", []).append(layer.path or "(model)")
        count = len(self.layers) - sum(map(len, left.values()))
        parts = [f"{count} of {len(self.layers)} matrices are quantised"]
        for note, paths in left.items():
            more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
            parts.append(f"{note}: {', '.join(paths[:2])}{more}")
        return "; ".join(parts)

    def __str__(self) -> str:
        tensors = ("weight", "input", "gradient")
        some_sums = any(layer.sums != IN_FLOAT32 for layer in self.layers)
        rows: list[tuple[str, ...]] = [("layer", "kernel", *tensors, *(["sums"] if some_sums else []), "")]
        for layer in self.layers:
            shape = "x".join(map(str, layer.kernel))
            operands = (_operand(layer, tensor) for tensor in tensors)
            sums = [_kinds(layer)] if some_sums else []
            rows.append((layer.path or "(model)", shape, *operands, *sums, layer.note))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _operand(layer: AppliedRecipe, tensor: str) -> str:
    """The format in which GEMMs read a tensor, in words; for each of its GEMMs, if they read different forms."""
    roles, found = layer.roles, {}
    if layer.loaded:
        return str(roles.weight.format) if tensor == "weight" and roles.weight else "-"
    decodable = tensor != "gradient" and isinstance(roles.operands("fprop"), tuple)
    for gemm in (gemm for gemm, tensors in GEMMS.items() if tensor in tensors):
        operands = roles.operands(gemm)
        role = roles.operand(tensor, gemm) if roles.ste is not None or isinstance(operands, tuple) else None
        decoded = decodable and operands == "dequantized"
        found[gemm] = "decoded" if decoded else "-" if role is None else str(role.format)
    return _of_each_gemm(found)


def _of_each_gemm(found: Mapping[str, str]) -> str:
    """The words for each GEMM, once if they are equal for all."""
    if len(set(found.values())) < 2:
        return next(iter(found.values()), "-")
    return ", ".join(f"{gemm} {what}" for gemm, what in found.items())


def _kinds(layer: AppliedRecipe) -> str:
    """How the sums of a layer's quantised GEMMs travel; for each of them, if they differ."""
    quantized = [gemm for gemm in GEMMS if isinstance(layer.roles.operands(gemm), tuple)]
    return _of_each_gemm({gemm: getattr(layer.sums, gemm) for gemm in quantized})
