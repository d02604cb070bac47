"""The costs of layers in high precision, and the choice of the layers to keep so within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlowprec.arrays.formats import Format
from jaxlowprec.recipes.roles import GEMMS, Recipe

_HIGH = 16.0  # bits of an element in high precision

Option = tuple[float, float, str | None]
"""Cost, error and label; or what a step costs and spares."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of a search.

    Attributes:
        layers: by name, multiply-adds of fprop and elements of the weight.
        candidates: recipes by label, the first the one that costs nothing.
        kind: "flops" or "bytes".
        by: "gemm" or "layer".
    """

    layers: Mapping[str, tuple[int, int]]
    candidates: Mapping[str, Recipe]
    kind: str
    by: str

    def of(self, layer: str, label: str | None) -> float:
        """The cost of a candidate in a layer, or in each of its GEMMs; None is high precision.

        It is a share of what it costs to keep everything in high precision.
        """
        total = sum(self._weight(name) for name in self.layers) * (len(GEMMS) if self.by == "gemm" else 1)
        first = self._bits(next(iter(self.candidates)))
        return self._weight(layer) / total * (self._bits(label) - first) / (_HIGH - first)

    def _weight(self, layer: str) -> int:
        macs, elements = self.layers[layer]
        return macs if self.kind == "flops" else elements

    def _bits(self, label: str | None) -> float:
        """Bits of an element, scales included: of the operands of all GEMMs, or of the weight."""
        if label is None:
            return _HIGH
        roles = self.candidates[label].roles()
        if self.kind == "bytes":
            return _bits_of(roles.forms("weight")[1])
        operands: list[Any] = []
        for gemm in GEMMS:
            found = roles.operands(gemm, self.candidates[label].backward_override)
            operands += found if isinstance(found, tuple) else (None, None)
        return sum(map(_bits_of, operands)) / len(operands)

    def choose(self, effects: Mapping[tuple[str, str, str], Any], budget: float) -> dict[tuple[str, str], str | None]:
        """Chooses the label that each GEMM of each layer follows, or None for high precision.

        Steps from one option of a place to a better and dearer one are taken in the order of the error that they
        spare for their cost, as far as the budget goes. Options that spare less for their cost than a dearer one are
        left out.
        """
        first = next(iter(self.candidates))
        places = dict.fromkeys((layer, gemm) for layer, gemm, _ in effects)
        chosen: dict[tuple[str, str], str | None] = dict.fromkeys(places, first)
        steps = []
        for order, place in enumerate(places):
            options: list[Option] = [
                (self.of(place[0], label), effects[*place, label].error, label) for label in self.candidates
            ]
            options.append((self.of(place[0], None), 0.0, None))
            for step, (ratio, more, label) in enumerate(_frontier(options)):
                steps.append((-ratio, order, step, more, place, label))
        left, ended = budget * (1 + 1e-9), set()
        for _, _, _, more, place, label in sorted(steps, key=lambda s: s[:3]):
            if place in ended or more > left:
                ended.add(place)
                continue
            left -= more
            chosen[place] = label
        return chosen


def _frontier(options: list[Option]) -> list[Option]:
    """Steps from the first option to better ones: error spared for their cost, cost, label, with falling ratios."""
    cost, error, _ = options[0]
    rest, steps = options[1:], list[Option]()
    while True:
        better = [(c, e, label) for c, e, label in rest if e < error and c >= cost]
        if not better:
            return steps
        c, e, label = max(better, key=lambda o: ((error - o[1]) / max(o[0] - cost, 1e-12), -o[0]))
        steps.append(((error - e) / max(c - cost, 1e-12), c - cost, label))
        cost, error = c, e


def _bits_of(role: Any) -> float:
    """Bits of an element and its part of a scale; that of a tensor or a line is too little to count."""
    if role is None:
        return _HIGH
    fmt: Format = role.format
    codes = 4.0 if fmt.packed else 8.0
    if fmt.scaling in ("tensor", "rows"):
        return codes
    height, length = fmt.block
    return codes + 8 * np.dtype(fmt.scale_dtype).itemsize / (height * length)
